"""vmem_jax: virtual memory for JAX training steps.

    step = vmem_jax.jit(train_step, budget="12GiB", donate_argnums=0)

runs the same step inside 12 GiB, and proves that it fits before anything runs.
"""

from vmem_jax.api.jit import BudgetedStep, jit
from vmem_jax.api.lowest import Lowest, lowest
from vmem_jax.api.oom import explain_oom
from vmem_jax.api.pareto import ParetoPoint, pareto
from vmem_jax.conv.api import conv_general_dilated
from vmem_jax.core.plan import Plan
from vmem_jax.errors import (
    BudgetError,
    CompileError,
    DifferentiationError,
    HostMemoryError,
    LayersError,
    PlanError,
    SubBatchError,
    TechniqueError,
    VmemError,
    WorkspaceError,
)
from vmem_jax.logs import from_environment
from vmem_jax.policy import (
    POLICIES,
    VDNN,
    AbstractPolicy,
    Auto,
    Exact,
    Infeasible,
    Keep,
    MoDNN,
    Recompute,
    SuperNeurons,
    UCuDNN,
    VDNNpp,
)

from_environment()

__version__ = "0.2.0"

__all__ = [
    "POLICIES",
    "VDNN",
    "AbstractPolicy",
    "Auto",
    "BudgetError",
    "BudgetedStep",
    "CompileError",
    "DifferentiationError",
    "Exact",
    "HostMemoryError",
    "Infeasible",
    "Keep",
    "LayersError",
    "Lowest",
    "MoDNN",
    "ParetoPoint",
    "Plan",
    "PlanError",
    "Recompute",
    "SubBatchError",
    "SuperNeurons",
    "TechniqueError",
    "UCuDNN",
    "VDNNpp",
    "VmemError",
    "WorkspaceError",
    "conv_general_dilated",
    "explain_oom",
    "jit",
    "lowest",
    "pareto",
]
