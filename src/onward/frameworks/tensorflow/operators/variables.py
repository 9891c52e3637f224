"""Variables: reading them, and what they are assigned."""

from __future__ import annotations

from onward.engines.framework import Operators

operators = Operators()

operators(ReadVariableOp=lambda op, variable, *, node: node.read(op, variable))


@operators.define("AssignVariableOp")
def assign(op, variable, value, *, node):
    node.walk.updates[variable.value] = value
    return ()


@operators.define("AssignAddVariableOp")
def assign_add(op, variable, value, *, node):
    return assign(op, variable, node.read(op, variable) + value, node=node)


@operators.define("AssignSubVariableOp")
def assign_sub(op, variable, value, *, node):
    return assign(op, variable, node.read(op, variable) - value, node=node)
