"""PyTorch objects that compute what no class of PyTorch's own does.

These files import nothing but PyTorch and each other, so that their source can go into a program that runs without us.
"""
