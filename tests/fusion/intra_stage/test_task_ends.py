"""What the end of a task waits for, in the traced pipeline: nothing is compiled."""

import jax
import pipeline_toy as toy
import pytest

from fuse_jax.fusion.intra_stage import native

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")


def operands(jaxpr, target, found):
    """Operands of each call of `target`, in a jaxpr and all within it."""
    for equation in jaxpr.eqns:
        if equation.params.get("target_name") == target:
            found.append(len(equation.invars))
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                operands(inner, target, found)
    return found


@pytest.mark.parametrize(
    ("transport", "operation", "kinds"), [("pair", "leave", "BW"), ("mailbox", "send", "W")]
)
def test_the_end_of_a_task_waits_for_its_sums(transport, operation, kinds):
    """A task of the weights' half sends nothing: its sums are all that it makes."""
    hp = toy.hyper_parameters((2, 2))
    params = toy.parameters(hp)
    case = toy.Case((2, 2), toy.minibatch(2), hp, transport=transport, split=True)
    traced = jax.make_jaxpr(case.function)(params, case.planned())
    found = operands(traced.jaxpr, f"fuse_jax_mailbox_{operation}", [])
    plain = 2  # the result and the head
    leaves = {name: len(jax.tree.leaves(params[name])) for name in params}
    assert len(found) == 2 * len("FBW")
    assert sum(number > plain + min(leaves.values()) for number in found) == 2 * len(kinds)
    assert found.count(plain) == 6 - 2 * len(kinds)
