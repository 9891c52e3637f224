"""Writers of programs, shared by frameworks. The part of one framework is a dialect."""
