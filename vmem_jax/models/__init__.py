"""Models, data and train steps that the command line and the benchmarks share.

Needs the extra `models` (Flax, Optax, scikit-learn): `pip install "vmem_jax[models]"`.
"""

try:
    from vmem_jax.models.data import Digits, batches, digits, digits_split
    from vmem_jax.models.jobs import Job, TrainState, cross_entropy, job
    from vmem_jax.models.networks import Network, build_network
    from vmem_jax.models.resnet import ResidualBlock, ResNet, ResNetBlocks, resnet_blocks
    from vmem_jax.models.scanned_resnet import ScannedResNet
    from vmem_jax.models.vgg import VGG, vgg_stages
except ModuleNotFoundError as error:
    if error.name is not None and error.name.split(".")[0] in ("flax", "optax"):
        raise ModuleNotFoundError(
            f'{error.name} is not installed: pip install "vmem_jax[models]"', name=error.name
        ) from error
    raise

__all__ = [
    "VGG",
    "Digits",
    "Job",
    "Network",
    "ResNet",
    "ResNetBlocks",
    "ResidualBlock",
    "ScannedResNet",
    "TrainState",
    "batches",
    "build_network",
    "cross_entropy",
    "digits",
    "digits_split",
    "job",
    "resnet_blocks",
    "vgg_stages",
]
