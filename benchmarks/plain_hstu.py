"""The yardstick of the CPU step: the same ranking model as anyone would write it first.

nn.Embedding tables with dense gradients, autograd through padded attention in four length buckets,
one Adam over everything, a plain loop. It takes over the weights of our model, so that the losses
of both can be compared before their speed is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import ExperimentArgs
from data.batch import SequenceBatch
from model.ranking import RankingModel

NUM_BUCKETS = 4


class PlainHSTU(nn.Module):
    """Same parameters, same function, plain PyTorch (no dropout, classes only, no bias tables)."""

    def __init__(
        self, experiment: ExperimentArgs, model: RankingModel, sharded_rows: dict[str, Tensor]
    ) -> None:
        super().__init__()
        network = experiment.network
        self.num_heads, self.width = network.num_attention_heads, network.kv_channels
        self.scaling_seqlen = float(experiment.resolved_scaling_seqlen or 1)
        self.contextual = experiment.contextual_feature_names
        self.items, self.actions = experiment.item_feature_name, experiment.action_feature_name
        self.hidden_dropout, self.input_dropout = network.hidden_dropout, network.input_dropout
        replicated = {f: model.trunk.replicated.tables[t].weight for f, t in _tables(model)}
        rows = replicated | sharded_rows
        self.tables = nn.ModuleDict(
            {f: nn.Embedding.from_pretrained(w.detach().clone(), freeze=False) for f, w in rows.items()}
        )
        trunk = model.trunk
        self.position = nn.Parameter(trunk.preprocessor.position.weight.detach().clone())
        self.layers = nn.ModuleList(_copy_layer(layer) for layer in trunk.stack.layers)
        self.head = _clone(trunk.head.layers)

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
            x = self._layer(layer, x, sizes, plan)
        logits = self.head(x[torch.cat(is_candidate)])
        first = lengths[0] - batch.num_candidates_B
        labels = torch.cat(
            [part[n:] for part, n in zip(batch.labels_E.split(lengths[0].tolist()), first.tolist())]
        )
        return F.cross_entropy(logits, labels, reduction="sum"), logits

    def _layer(self, layer: nn.ModuleDict, x: Tensor, sizes: list[int], plan: list) -> Tensor:
        uvqk = F.silu(layer["uvqk"](layer["norm_in"](x))).view(len(x), self.num_heads, 4, -1)
        u, v, q, k = uvqk.unbind(2)
        attended: list[Tensor] = [x] * len(sizes)
        split = [part.split(sizes) for part in (q, k, v)]
        for users, mask in plan:
            q_pad, k_pad, v_pad = (
                nn.utils.rnn.pad_sequence([part[i] for i in users], batch_first=True) for part in split
            )
            scores = torch.einsum("bihd,bjhd->bhij", q_pad, k_pad) * self.width**-0.5
            weights = F.silu(scores) / self.scaling_seqlen * mask[:, None]
            out = torch.einsum("bhij,bjhd->bihd", weights, v_pad)
            for index, user in enumerate(users):
                attended[user] = out[index, : sizes[user]]
        gated = layer["norm_out"](torch.cat(attended).flatten(1)) * u.flatten(1)
        return x + layer["proj"](F.dropout(gated, self.hidden_dropout, self.training))


def _tables(model: RankingModel) -> list[tuple[str, str]]:
    return list(model.trunk.replicated._table_of.items())


def _clone(module: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(module)


def _copy_layer(layer: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "norm_in": _clone(layer.input.norm),
            "uvqk": _clone(layer.input.uvqk),
            "norm_out": _clone(layer.output.norm),
            "proj": _clone(layer.output.proj),
        }
    )


def _bucket_plan(
    sizes: list[int], is_candidate: list[Tensor], num_contextuals: int
) -> list[tuple[list[int], Tensor]]:
    """Users of similar length together, with the mask of each bucket (b, n, n)."""
    order = sorted((i for i, size in enumerate(sizes) if size), key=lambda i: sizes[i])
    per_bucket = max(1, -(-len(order) // NUM_BUCKETS))
    plan = []
    for begin in range(0, len(order), per_bucket):
        users = order[begin : begin + per_bucket]
        longest = max(sizes[i] for i in users)
        masks = torch.zeros(len(users), longest, longest, dtype=torch.bool)
        for index, user in enumerate(users):
            n, candidate = sizes[user], is_candidate[user]
            mask = torch.ones(n, n, dtype=torch.bool).tril()
            mask[:num_contextuals] = ~candidate
            mask &= ~candidate[None, :] | torch.eye(n, dtype=torch.bool)
            masks[index, :n, :n] = mask
        plan.append((users, masks))
    return plan
