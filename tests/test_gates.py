"""Where a forward pass waits for each parameter: before its first use, whatever module that is in."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ringprune.gates import Gates


class Log:
    """Gates of a model, and what they have waited for in the forward pass under way."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.names = [name for name, _ in model.named_parameters()]
        self.arrived: list[str] = []
        self.gates = Gates(model, self.params, self.arrive)

    def arrive(self, needed: Sequence[int]) -> None:
        self.arrived += [self.names[i] for i in needed if self.names[i] not in self.arrived]

    def during(self, call: Callable[[], Any]) -> list[str]:
        self.arrived = []
        call()
        return self.arrived


class Tied(nn.Module):
    """An embedding that is the output matrix too, used there as a function; and a module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.embedding = nn.Embedding(12, 8)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.middle(self.embedding(x)))
        return nn.functional.linear(x, self.embedding.weight) + self.head(x)


class Attention(nn.Module):
    """Reads the weights of its output layer, whose forward is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last, self.unused = nn.MultiheadAttention(8, 2), nn.Linear(8, 8), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.attention(x, x, x)[0])
        return out


def test_at_first_everything_is_waited_for_before_the_model_runs() -> None:
    log = Log(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    seen: list[list[str]] = []
    log.gates._model[0].register_forward_pre_hook(lambda module, args: seen.append(list(log.arrived)))
    log.during(lambda: log.gates._model(torch.ones(1, 4)))
    assert seen == [log.names]


def test_afterwards_each_layer_waits_for_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    log = Log(model)
    model(torch.ones(2, 4))
    seen: dict[int, list[str]] = {}
    for place in (0, 2, 3):
        model[place].register_forward_pre_hook(lambda module, args, at=place: seen.update({at: list(log.arrived)}))
    log.during(lambda: model(torch.ones(2, 4)))
    assert seen[0] == ["0.weight", "0.bias"]
    assert seen[2] == [*seen[0], "2.weight", "2.bias"]
    assert seen[3] == log.names


@pytest.mark.parametrize("training", [True, False])
def test_a_tied_weight_is_waited_for_where_it_is_used_first(training: bool) -> None:
    model = Tied()
    log = Log(model)
    model(torch.tensor([1, 2]))
    assert [log.names[i] for i in log.gates.order] == ["head.weight", "middle.weight", "middle.bias"]
    seen: list[str] = []
    model.embedding.register_forward_hook(lambda module, args, output: seen.extend(log.arrived))
    model.train(training)
    log.during(lambda: model(torch.tensor([1, 2])))
    # Evaluation may go another way than the pass that was watched: it waits for everything.
    assert seen == (["head.weight"] if training else log.names)
    assert set(log.arrived) == set(log.names)


def test_weights_that_another_module_reads_are_waited_for_before_that_one_runs() -> None:
    model = Attention()
    log = Log(model)
    model(torch.ones(3, 1, 8))
    seen: list[str] = []
    model.attention.register_forward_hook(lambda module, args, output: seen.extend(log.arrived))
    log.during(lambda: model(torch.ones(3, 1, 8)))
    assert {"attention.out_proj.weight", "attention.in_proj_weight"} <= set(seen)
    assert "last.weight" not in seen
    # What the forward pass does not use is waited for in the nearest module around it that runs: here the model.
    assert seen[:2] == ["unused.weight", "unused.bias"]


class Own(torch.autograd.Function):
    """A function of the user's own, of which torch functions see nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.detach() * weight.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] * weight, (grads[0] * x).sum(0)


class Scaled(nn.Module):
    """Holds its weights in a list, whose forward is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(4))])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Own.apply(x, self.weights[0])
        return out


def test_what_a_function_of_the_users_own_uses_is_waited_for_in_its_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 4), Scaled())
    log = Log(model)
    model(torch.ones(1, 4))
    assert [log.names[i] for i in log.gates.order] == [
        "0.weight",
        "0.bias",
        "1.weights.0",
        "2.weight",
        "2.bias",
        "3.weights.0",
    ]
    seen: list[str] = []
    model[2].register_forward_hook(lambda module, args, output: seen.extend(log.arrived))
    assert log.during(lambda: model(torch.ones(1, 4))) == log.names
    assert seen == log.names[:-1]


def test_a_recurrent_layer_gives_its_weights_in_lists() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4, num_layers=2))
    log = Log(model)
    model(torch.ones(3, 1, 4))
    seen: list[str] = []
    model[0].register_forward_hook(lambda module, args, output: seen.extend(log.arrived))
    assert log.during(lambda: model(torch.ones(3, 1, 4))) == log.names
    assert seen == ["0.weight", "0.bias"]


def test_a_module_called_outside_the_models_forward_waits_for_everything() -> None:
    model = Tied()
    log = Log(model)
    assert log.during(lambda: model.middle(torch.ones(1, 8))) == log.names
    model(torch.tensor([1, 2]))
    assert log.during(lambda: model.middle(torch.ones(1, 8))) == log.names


def test_a_forward_pass_that_fails_teaches_nothing_and_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))
    log = Log(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 4))
    assert log.during(lambda: model[0](torch.ones(1, 4))) == log.names
    assert log.gates.order == [0, 1, 2, 3]
    assert torch.overrides._get_current_function_mode() is None


def test_closing_after_ctrl_c_in_the_first_pass_takes_no_mode_of_others() -> None:
    """That pass is watched by a mode of torch's, and torch calls no hooks after Ctrl-C; a default device is one too."""

    class Stopped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    gates = Log(model := Stopped(4, 4)).gates
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 4))
    with torch.device("meta"):
        for _ in range(2):
            gates.close()
            assert torch.empty(1).is_meta
    assert torch.overrides._get_current_function_mode() is None


def test_evaluation_teaches_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    log = Log(model)
    model(torch.ones(1, 4))
    with torch.no_grad():
        model.train()(torch.ones(1, 4))
    assert not log.gates._known


def test_closing_removes_all_hooks() -> None:
    model = Tied()
    log = Log(model)
    model(torch.tensor([1]))
    log.gates.close()
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert not module._state_dict_pre_hooks
        assert not module._load_state_dict_pre_hooks


def test_saving_and_loading_wait_for_everything() -> None:
    model = Tied()
    log = Log(model)
    model(torch.tensor([1]))
    assert log.during(model.state_dict) == log.names
    assert log.during(model.middle.state_dict) == log.names
    state = model.state_dict()
    assert log.during(lambda: model.load_state_dict(state)) == log.names


def test_a_compiled_module_runs_what_waits_as_it_is() -> None:
    """torch.compile went into it, and made collectives twice or not at all: ranks met in different ones."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen: list[bool] = []
    Gates(model, list(model.parameters()), lambda needed: seen.append(torch.compiler.is_compiling()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own about what it does not go into
        for layer in model:
            layer.compile(backend="eager")
        for _ in range(3):
            model(torch.ones(1, 4))
    assert seen
    assert not any(seen)
