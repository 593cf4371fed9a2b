"""uniep in Megatron-Core: the MoE layer of a model's spec, and its megakernel backend.

:func:`with_uniep` puts :class:`UniepMoELayer` into the spec that a model is built of, which works
with released packages. :func:`use_megakernel` is for a Megatron-Core that has
``moe_megakernel_backend``. docs/megatron.md says what is supported.
"""

from .experts import UniepExperts
from .layer import UniepMoELayer, UniepTokenDispatcher, with_uniep
from .megakernel import UniepMegakernelBackend, use_megakernel
from .options import Options
from .routes import routes

__all__ = [
    "Options",
    "UniepExperts",
    "UniepMegakernelBackend",
    "UniepMoELayer",
    "UniepTokenDispatcher",
    "routes",
    "use_megakernel",
    "with_uniep",
]
