"""What ranks tell each other, by torch.distributed."""
import torch
import torch.distributed as dist

DEVICE = "cuda"


def rank():
    return dist.get_rank()


def size():
    return dist.get_world_size()


def all_gather(tensor):
    """[ranks, ...] of every rank's tensor, which has the same shape on all."""
    gathered = tensor.new_empty(size() * tensor.numel())
    dist.all_gather_into_tensor(gathered, tensor.contiguous().view(-1))
    return gathered.view(size(), *tensor.shape)


def gather_numbers(values):
    """Every rank's list of numbers."""
    return all_gather(torch.tensor(values, device=DEVICE, dtype=torch.float64)).tolist()


def total(counts):
    """The sums over ranks of a list of numbers."""
    return [sum(column) for column in zip(*gather_numbers(counts))]


def together():
    """Nothing is under way on any rank's device when it returns."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
