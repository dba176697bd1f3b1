"""The conformance table of the four calls, on the CPU twins."""

import jax
import pytest
import transfer_cases


@pytest.mark.parametrize("case", transfer_cases.CASES, ids=lambda case: case.__name__)
def test_on_the_cpu(case):
    case(jax.devices("cpu")[0])
