"""What stands where in a compiled program, from the text that XLA prints of it."""

import re

import jax

COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)
MATRIX_PRODUCT = re.compile(r"= \w+\[([\d,]*)\]\S* dot\(")


def compile_for_its_text(monkeypatch):
    """Let programs that are only read be compiled without LLVM's optimisation, in half the time.

    What XLA prints and counts is what it hands to LLVM, and stays the same.
    """
    plain = jax.stages.Lowered.compile

    def quickly(lowered):
        return plain(lowered, {"xla_backend_optimization_level": 0})

    monkeypatch.setattr(jax.stages.Lowered, "compile", quickly)


def by_depth(text, pattern):
    """How often a pattern's group stands in a program, by (group, depth of loops and branches)."""
    bodies, name = {}, ""
    for line in text.splitlines():
        start = re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if start:
            name = "ENTRY" if start[1] else start[2]
        bodies.setdefault(name, []).append(line)
    found = {}
    nested = re.compile(r"(?:body|true_computation|false_computation)=%?([\w.\-]+)")
    inline = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")

    def visit(name, depth):
        for line in bodies[name]:
            for match in pattern.finditer(line):
                found[match[1], depth] = found.get((match[1], depth), 0) + 1
            branches = re.search(r"branch_computations=\{([^}]*)\}", line)
            inner = nested.findall(line) + re.findall(r"[\w.\-]+", branches[1] if branches else "")
            for other in inner:
                visit(other, depth + 1)
            for other in inline.findall(line):
                visit(other, depth)

    visit("ENTRY", 0)
    return found
