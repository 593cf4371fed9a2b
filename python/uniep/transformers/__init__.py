"""uniep as the experts of transformers' MoE models.

    import uniep.transformers

    uniep.transformers.use(model)  # all experts in this process

    uniep.transformers.register()
    DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="uniep")  # expert parallel

Router, shared experts and all else stay the model's own modules, but
``use(model, shared_experts="fused")`` runs shared experts in the same pass as the others.
docs/transformers.md has figures, and docs/models.md what is supported.
"""

from .models import check, use
from .registration import register

__all__ = ["check", "register", "use"]
