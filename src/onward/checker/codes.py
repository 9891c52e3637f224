"""Codes of the checker: severity, meaning, and the text that demands each rule.

Codes are stable: programs compare them and people search for them. A retired code is never used
again. Severity: a MUST of IR.md, and a model that cannot work, is an error. A comment in
onnx.proto, and a model that works but looks like a mistake, is a warning. The rest is information.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial


class Severity(StrEnum):
    """Severity of a finding, the worst first."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Code:
    severity: Severity
    meaning: str
    rule: str


IR_MODEL, IR_GRAPH, IR_NAMES = "IR.md, models", "IR.md, graphs", "IR.md, names"
IR_DATA, IR_OPSETS, IR_FUNCTIONS = "IR.md, external data", "IR.md, operator sets", "IR.md, functions"
IR_TRAINING = "IR.md, training"
COMMENT = "onnx.proto comment"
CHECKER = "onnx.checker"
GRADIENT, OPTIMIZER = "Gradient operator", "optimizer operators"
RUNTIME = "ONNX Runtime"
ONWARD = "Onward"

FAMILIES = {
    "OW1": "file and structure",
    "OW2": "bindings and state",
    "OW3": "initialization",
    "OW4": "Gradient",
    "OW5": "optimizers",
    "OW6": "functions, operator sets, runtimes",
    "OW7": "metadata and staleness",
    "OW8": "runs",
}


REFRESH = "if another tool changed the model: `onward refresh CHANGED --training ORIGINAL`"
"""Hint for training information that does not match the inference graph."""

_error, _warning, _info = (partial(Code, severity) for severity in Severity)

CODES: dict[str, Code] = {
    # ---- file and structure
    "OW101": _error("the model has no graph", IR_MODEL),
    "OW102": _error("the IR version is missing or impossible", IR_MODEL),
    "OW103": _error("the IR version is newer than the installed onnx supports", CHECKER),
    "OW104": _error("a string in the file is not UTF-8", "protobuf"),
    "OW105": _error("messages are nested deeper than any reader accepts", "protobuf"),
    "OW106": _warning("training information of a draft of 2019 or 2020, which is converted", ONWARD),
    "OW107": _warning("`GraphCall`, which existed only in onnx 1.7.0, and is converted", ONWARD),
    "OW108": _error("a graph has no name", IR_GRAPH),
    "OW109": _info("the model is too large for everything to be checked", ONWARD),
    "OW110": _error("onnx.checker refuses the inference model", CHECKER),
    "OW111": _error("onnx.checker refuses the combined graph of a step", CHECKER),
    "OW112": _error("onnx.checker refuses an initialization graph", CHECKER),
    "OW113": _error("types or shapes contradict each other", "shape inference"),
    "OW114": _error("onnx.checker crashed on the model, or did not come to an end", CHECKER),
    "OW115": _error("training information of an older form that cannot be converted", ONWARD),
    "OW116": _warning("a file of a run has changed since the run saved it", ONWARD),
    "OW117": _warning("onnx refuses the inference model, and ONNX Runtime loads it", CHECKER),
    "OW118": _warning("a size is negative, which ONNX Runtime takes as open", IR_GRAPH),
    "OW120": _error("a name is defined twice in one graph", IR_NAMES),
    "OW121": _error("an algorithm declares a name that the inference graph has", IR_TRAINING),
    "OW122": _error("the inference graph reads a value of an algorithm", COMMENT),
    "OW123": _error("a value is read that nothing defines", IR_NAMES),
    "OW124": _error("nodes depend on each other in a circle", IR_GRAPH),
    "OW125": _error("nodes are not in topological order", IR_GRAPH),
    "OW126": _error("a graph output is not computed", IR_GRAPH),
    "OW127": _warning("an algorithm repeats an output of the inference graph", COMMENT),
    "OW128": _error("a step reads a value of another step", ONWARD),
    "OW130": _error("the data of a tensor does not fit its type and shape", IR_DATA),
    "OW131": _error("external data lies where it cannot be read, or must not", IR_DATA),
    "OW132": _error("external data is not as long as the tensor needs", IR_DATA),
    "OW133": _error("external data of two tensors overlaps", ONWARD),
    "OW134": _error("external data in a file of another program has changed", ONWARD),
    "OW140": _error("a device configuration lacks its name or its devices, or is declared twice", COMMENT),
    "OW141": _error("a node names a device configuration that the model does not have", COMMENT),
    "OW142": _error("a sharding does not fit its tensor or the devices", COMMENT),
    "OW143": _error("device configurations need IR version 11", IR_MODEL),
    # ---- bindings and state
    "OW201": _error("a binding's key is not an initializer that the step can change", IR_TRAINING),
    "OW202": _error("a key is bound twice in one entry", IR_TRAINING),
    "OW203": _warning("two entries update the same variable", COMMENT),
    "OW204": _warning("two entries initialize the same variable", ONWARD),
    "OW205": _error("the value of an update binding is not an output of the algorithm", IR_TRAINING),
    "OW206": _warning("the value of an update binding is an output of the inference graph", COMMENT),
    "OW207": _error("a variable and its new value differ in type", ONWARD),
    "OW208": _error("a variable and its new value differ in shape", ONWARD),
    "OW209": _error("a sparse initializer cannot be a state variable", ONWARD),
    "OW210": _warning("a state variable is also an input that a caller may override", ONWARD),
    "OW211": _warning("one output is assigned to two variables", ONWARD),
    "OW212": _warning("an update binding changes nothing", ONWARD),
    "OW213": _warning("a result of an optimizer is assigned to nothing", ONWARD),
    "OW214": _info("an output of the algorithm is not bound to a variable", ONWARD),
    "OW215": _warning("state that is initialized but never updated", ONWARD),
    "OW216": _warning("state without initialization: a reset does not restore it", ONWARD),
    "OW217": _warning("an empty step", ONWARD),
    "OW218": _info("a step that updates nothing", ONWARD),
    "OW219": _warning("a variable gets the new value of another variable", ONWARD),
    "OW220": _error("a binding without key or value", IR_TRAINING),
    # ---- initialization
    "OW301": _error("an initialization graph has inputs", COMMENT),
    "OW302": _error("initialization bindings without an initialization graph", IR_TRAINING),
    "OW303": _error("an initialization graph reads a value of another graph", COMMENT),
    "OW304": _error("the value of an initialization binding is not an output of the graph", IR_TRAINING),
    "OW305": _error("a variable and its initial value differ in type", ONWARD),
    "OW306": _error("a variable and its initial value differ in shape", ONWARD),
    "OW307": _warning("an initialization graph computes what no binding assigns", ONWARD),
    "OW308": _info("random initial values without a seed", ONWARD),
    # ---- Gradient
    "OW401": _error("`xs` is missing", GRADIENT),
    "OW402": _error("`y` is missing", GRADIENT),
    "OW403": _error("a name in `xs`, `zs` or `y` is not in the graph", GRADIENT),
    "OW404": _error("not one input for each name in `xs` and `zs`", GRADIENT),
    "OW405": _error("more outputs than names in `xs`", GRADIENT),
    "OW406": _error("a name is twice in `xs` or in `zs`", GRADIENT),
    "OW407": _error("a name is in `xs` and in `zs`", GRADIENT),
    "OW408": _warning("`y` does not depend on a name in `xs`", GRADIENT),
    "OW409": _warning("the derivative is zero everywhere on the way", GRADIENT),
    "OW410": _warning("the variables are not independent of each other", GRADIENT),
    "OW411": _warning("`y` is not a scalar: the gradient of its sum is taken", GRADIENT),
    "OW412": _warning("`y` depends on an input that is neither in `xs` nor in `zs`", GRADIENT),
    "OW413": _error("a name in `xs` is not of a floating-point type", GRADIENT),
    "OW414": _error("`y` is not of a floating-point type", GRADIENT),
    "OW415": _error("`y` depends on the result of this Gradient", GRADIENT),
    "OW416": _warning("Gradient inside a subgraph or a function", GRADIENT),
    "OW417": _error("an input differs in type from the tensor that it stands for", GRADIENT),
    "OW418": _warning("a gradient is computed and not used", ONWARD),
    "OW419": _warning("a parameter gets no gradient", ONWARD),
    "OW420": _warning("a gradient is taken of an initializer that nothing updates", ONWARD),
    # ---- optimizers
    "OW501": _error("no such operator in ai.onnx.preview.training", OPTIMIZER),
    "OW502": _error("the number of inputs does not fit", OPTIMIZER),
    "OW503": _error("the number of outputs does not fit the inputs", OPTIMIZER),
    "OW504": _error("a required attribute is missing", OPTIMIZER),
    "OW505": _error("`mode` is neither standard nor nesterov", OPTIMIZER),
    "OW506": _error("R, the learning rate, is not a float or double scalar", OPTIMIZER),
    "OW507": _error("T, the update count, is not an int64 scalar", OPTIMIZER),
    "OW508": _error("a tensor, its gradient and its slots differ in type", OPTIMIZER),
    "OW509": _error("a tensor, its gradient and its slots differ in shape", OPTIMIZER),
    "OW510": _warning("Adam counts from 0: its bias correction needs T from 1", OPTIMIZER),
    "OW511": _warning("T never advances", ONWARD),
    "OW512": _warning("a coefficient is outside its range", ONWARD),
    # ---- functions, operator sets, runtimes
    "OW601": _error("ai.onnx.preview.training is used and not imported", IR_OPSETS),
    "OW602": _error("ai.onnx.preview.training has only version 1", IR_OPSETS),
    "OW603": _error("training information needs IR version 7", IR_MODEL),
    "OW604": _error("model-local functions need IR version 8", IR_FUNCTIONS),
    "OW605": _error("a domain is used and not imported", IR_OPSETS),
    "OW606": _warning("an operator that neither the standard nor a function of the model defines", ONWARD),
    "OW607": _error("a call of a function that the model does not have", IR_FUNCTIONS),
    "OW608": _error("functions call each other in a circle", IR_FUNCTIONS),
    "OW609": _error("a call gives or takes more than the function has", IR_FUNCTIONS),
    "OW610": _warning("a call gives less than the function takes", IR_FUNCTIONS),
    "OW611": _error("a call lacks an attribute that the function needs", IR_FUNCTIONS),
    "OW612": _warning("a call has an attribute that the function does not have", IR_FUNCTIONS),
    "OW613": _error("a function is defined twice", IR_FUNCTIONS),
    "OW614": _error("functions expand to more nodes than anything can run", ONWARD),
    "OW615": _info("a function is never called", ONWARD),
    "OW616": _error("a domain is imported in two versions", IR_OPSETS),
    "OW617": _warning("the operator set is newer than the installed onnx supports", CHECKER),
    "OW618": _error("a function has another version of an operator than the model", COMMENT),
    "OW650": _error("the operator set is newer than the runtime loads", RUNTIME),
    "OW651": _error("the IR version is newer than the runtime loads", RUNTIME),
    "OW652": _info("training operators are lowered before the runtime sees them", RUNTIME),
    "OW653": _error("the runtime has no CPU kernel for an operator", RUNTIME),
    "OW654": _error("the runtime has no operators of a domain", RUNTIME),
    "OW655": _error("training operators in the inference graph, which the runtime loads without lowering", RUNTIME),
    # ---- metadata and staleness
    "OW701": _warning("the inference graph has changed since the training was written", ONWARD),
    "OW702": _error("an algorithm reads a value that the inference graph does not have", IR_TRAINING),
    "OW703": _warning("metadata that should be JSON does not parse", ONWARD),
    "OW704": _warning("metadata names a parameter that does not exist", ONWARD),
    "OW705": _info("an unknown role", ONWARD),
    "OW706": _warning("a duplicate metadata key", COMMENT),
    "OW707": _error("a duplicate metadata key of the model", CHECKER),
    "OW708": _warning("metadata on graphs, nodes or tensors needs IR version 10", COMMENT),
    # ---- runs
    "OW801": _error("a run lacks a file that it needs", ONWARD),
    "OW802": _error("a file of a run cannot be read", ONWARD),
    "OW803": _error("a file of a run is damaged: its checksum differs", ONWARD),
}


# ---- findings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of `onward.check`: an error, a warning or a note."""

    code: str
    """Code in the table of checks, such as `OW201`."""
    severity: Severity
    place: str
    """Path in the file: `training_info[0].algorithm/node[3] Gradient "grad"`."""
    message: str
    rule: str
    """The text that demands it: `IR.md, training`, `onnx.proto comment`, `Gradient operator`, `Onward` ..."""
    hint: str | None = None

    def to_json(self) -> dict[str, str | None]:
        return {**asdict(self), "severity": str(self.severity)}

    def __str__(self) -> str:
        return f"{self.severity} {self.code} at {self.place}: {self.message}"


def make_finding(code: str, place: str, message: str, hint: str | None = None) -> Finding:
    """Return a finding with the severity and the rule of its code."""
    entry = CODES[code]
    return Finding(code, entry.severity, place, message, entry.rule, hint)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return each finding once: errors, then warnings, then notes, otherwise in their order."""
    return sorted(dict.fromkeys(findings), key=lambda finding: list(Severity).index(finding.severity))


def bare(name: str, most: int = 80) -> str:
    """Return a name to show: limited in length, without control characters."""
    name = name if name.isprintable() else name.encode("unicode_escape").decode("ascii")
    return name if len(name) <= most else f"{name[: most - 1]}…"


def quote(name: str, most: int = 80) -> str:
    return f"`{bare(name, most)}`"


def listing(names: Iterable[str], most: int = 4) -> str:
    """Return the first few names for a sentence, and the number of the others."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(quote, names[:most])) + more
