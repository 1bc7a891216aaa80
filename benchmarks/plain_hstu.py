"""The yardstick of the CPU step: the same ranking model as anyone would write it first.

nn.Embedding tables with dense gradients, autograd through padded attention in four length buckets,
one Adam over everything, a plain loop. It takes over the weights of our model, so that the losses
of both can be compared before their speed is.
"""

import copy
import dataclasses
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import ExperimentArgs
from data.batch import SequenceBatch
from model.trunk import SequenceModel

NUM_BUCKETS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """Users of similar length, padded to the longest (b users, n tokens)."""

    token: Tensor
    """(b, n), the packed row of each token; padding repeats the user's first."""
    is_real: Tensor
    """(b, n), bool."""
    mask: Tensor
    """(b, 1, n, n), 1 where a row sees a column."""


class PlainHSTU(nn.Module):
    """Same parameters, same function, plain PyTorch (no dropout, classes only, no bias tables)."""

    def __init__(
        self, experiment: ExperimentArgs, model: SequenceModel, sharded_rows: dict[str, Tensor]
    ) -> None:
        super().__init__()
        network = experiment.network
        self.num_heads, self.width = network.num_attention_heads, network.kv_channels
        self.scaling_seqlen = float(experiment.resolved_scaling_seqlen or 1)
        self.contextual = experiment.contextual_feature_names
        self.items, self.actions = experiment.item_feature_name, experiment.action_feature_name
        self.hidden_dropout, self.input_dropout = network.hidden_dropout, network.input_dropout
        tables = model.trunk.replicated
        rows = sharded_rows | {
            feature: tables.tables[spec.module_name].weight
            for spec in tables.specs
            for feature in spec.feature_names
        }
        self.tables = nn.ModuleDict(
            {
                f: nn.Embedding.from_pretrained(w.detach().clone(), freeze=False)
                for f, w in rows.items()
            }
        )
        trunk = model.trunk
        self.position = nn.Parameter(trunk.preprocessor.position.weight.detach().clone())
        self.layers = nn.ModuleList(_copy_layer(layer) for layer in trunk.stack.layers)
        self.norm = copy.deepcopy(trunk.norm)
        self.head = copy.deepcopy(trunk.head.layers)

    def forward(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Summed cross entropy over the candidates, and the logits."""
        lengths = batch.features.lengths().view(-1, batch.batch_size)
        rows = {
            name: self.tables[name](batch.features[name].values()).split(lengths[i].tolist())
            for i, name in enumerate(batch.features.keys())
        }
        sequences, is_candidate, positions = [], [], []
        for user in range(batch.batch_size):
            items, actions = rows[self.items][user], rows[self.actions][user]
            num_history = len(actions)
            contextual = [rows[name][user] for name in self.contextual]
            history = torch.stack([items[:num_history], actions], dim=1).flatten(0, 1)
            sequences.append(torch.cat([*contextual, history, items[num_history:]]))
            c, h, t = sum(map(len, contextual)), 2 * num_history, len(items) - num_history
            is_candidate.append(torch.arange(c + h + t) >= c + h)
            back = torch.cat([torch.arange(h, 0, -1), torch.zeros(t, dtype=torch.int64)])
            position = torch.cat([torch.arange(c), back + len(self.contextual)])
            positions.append(position.clamp(max=len(self.position) - 1))
        x = torch.cat(sequences) + self.position[torch.cat(positions)]
        x = F.dropout(x, self.input_dropout, self.training)
        sizes = [len(sequence) for sequence in sequences]
        plan = _bucket_plan(sizes, is_candidate, len(self.contextual))
        for layer in self.layers:
            x = self._layer(layer, x, plan)
        logits = self.head(self.norm(x[torch.cat(is_candidate)]))
        first = lengths[0] - batch.num_candidates_B
        labels = torch.cat(
            [
                part[num_history:]
                for part, num_history in zip(
                    batch.labels_E.split(lengths[0].tolist()), first.tolist(), strict=True
                )
            ]
        )
        return F.cross_entropy(logits, labels, reduction="sum"), logits

    def _layer(self, layer: nn.ModuleDict, x: Tensor, plan: list[Bucket]) -> Tensor:
        uvqk = F.silu(layer["uvqk"](layer["norm_in"](x))).view(len(x), self.num_heads, 4, -1)
        u, v, q, k = uvqk.unbind(2)
        attended = []
        for bucket in plan:
            q_pad, k_pad, v_pad = (part[bucket.token].transpose(1, 2) for part in (q, k, v))
            scores = q_pad @ k_pad.transpose(-1, -2) * self.width**-0.5
            weights = F.silu(scores) / self.scaling_seqlen * bucket.mask
            attended.append((weights @ v_pad).transpose(1, 2)[bucket.is_real])
        order = torch.cat([bucket.token[bucket.is_real] for bucket in plan])
        gated = torch.empty_like(u).index_put((order,), torch.cat(attended))
        gated = layer["norm_out"](gated.flatten(1)) * u.flatten(1)
        return x + layer["proj"](F.dropout(gated, self.hidden_dropout, self.training))


def _copy_layer(layer: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "norm_in": copy.deepcopy(layer.input.norm),
            "uvqk": copy.deepcopy(layer.input.uvqk),
            "norm_out": copy.deepcopy(layer.output.norm),
            "proj": copy.deepcopy(layer.output.proj),
        }
    )


def _bucket_plan(
    sizes: list[int], is_candidate: list[Tensor], num_contextuals: int
) -> list[Bucket]:
    """Users of similar length together, four buckets of them."""
    first = [0, *itertools.accumulate(sizes)]
    order = sorted((i for i, size in enumerate(sizes) if size), key=lambda i: sizes[i])
    per_bucket = max(1, -(-len(order) // NUM_BUCKETS))
    plan = []
    for begin in range(0, len(order), per_bucket):
        users = order[begin : begin + per_bucket]
        longest = max(sizes[i] for i in users)
        position = torch.arange(longest)
        size = torch.tensor([sizes[i] for i in users])[:, None]
        is_real = position < size
        token = torch.tensor([first[i] for i in users])[:, None] + position * is_real
        candidate = nn.utils.rnn.pad_sequence([is_candidate[i] for i in users], batch_first=True)
        mask = torch.ones(longest, longest, dtype=torch.bool).tril().expand(len(users), -1, -1)
        mask = mask | (position < num_contextuals)[None, :, None]
        mask &= ~candidate[:, None, :] | torch.eye(longest, dtype=torch.bool)
        mask &= is_real[:, None, :] & is_real[:, :, None]
        plan.append(Bucket(token=token, is_real=is_real, mask=mask[:, None].float()))
    return plan
