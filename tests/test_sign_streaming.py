"""One clip at a time: answers are the model's own, alone and on a window that slides."""

import numpy as np
import pytest
import torch

from nbtools.errors import PlanError
from nbtools.tasks import sign


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBTOOLS_CACHE", str(tmp_path_factory.mktemp("cache")))
        source = sign.demo(tmp_path_factory.mktemp("raw"), 24, glosses=4, features=True)
        yield sign.pack(source, progress=False)


@pytest.fixture(scope="module", params=["transformer", "gru"])
def network(request, pack):
    torch.manual_seed(0)
    plan = sign.Plan(network=request.param)
    return sign.model(pack, plan).eval(), plan


def alone(network, clip):
    """(gloss probabilities) by a batch of one, through the task's own functions."""
    model, plan = network
    raw = {name: torch.from_numpy(values)[None] for name, values in clip.items()}
    raw |= {f"{name}_length": torch.tensor([len(clip[name])]) for name in ("x", "mask", "features")}
    with torch.no_grad():
        return model(sign.batch(raw, plan, None))[0].softmax(1)[0]


def test_an_answer_is_the_models_likeliest_gloss_on_the_window_so_far(pack, network):
    model, plan = network
    clip = pack.sample(0)
    frames = len(clip["x"])
    found = list(sign.stream(model, pack, plan, clip, window=10, every=4))
    assert [one.frame for one in found] == list(range(4, frames + 1, 4))
    for one in found:
        part = {name: values[max(0, one.frame - 10) : one.frame] for name, values in clip.items() if name != "label"}
        expected = alone(network, part)
        assert one.gloss == pack.classes[int(expected.argmax())]
        assert one.probability == pytest.approx(float(expected.max()), abs=1e-5)
        assert one.seconds > 0


def test_what_the_model_does_not_read_is_not_brought_to_it(pack, network):
    model, plan = network
    clip, unread = dict(pack.sample(0)), {"transformer": "features", "gru": "x"}[plan.network]
    clip[unread] = np.full((2, 3), "never a tensor")
    (found,) = sign.stream(model, pack, plan, clip, window=99, every=len(clip["mask"]))
    assert found.frame == len(clip["mask"])


def test_a_clip_shorter_than_the_pace_gets_one_answer(pack, network):
    clip = {name: values[:3] for name, values in pack.sample(0).items() if name != "label"}
    assert [one.frame for one in sign.stream(network[0], pack, network[1], clip, every=5)] == [3]


def test_latency_is_of_so_many_answers_to_single_clips(pack, network):
    model, plan = network
    clips = [pack.sample(i) for i in range(7)]
    found = sign.latency(model, pack, plan, clips)
    assert (found.n, found.device) == (7, "cpu")
    assert found.frames == round(float(np.median([len(clip["x"]) for clip in clips])))
    assert 0 < found.median <= found.slowest
    assert "ms" in str(found)
    assert "<table" in found._repr_html_()


@pytest.mark.parametrize("wrong", [{"window": 0}, {"every": 0}])
def test_a_window_or_a_pace_of_nothing_is_refused(pack, network, wrong):
    with pytest.raises(PlanError, match="must be ≥ 1 frame"):
        next(sign.stream(network[0], pack, network[1], pack.sample(0), **wrong))
    with pytest.raises(PlanError, match="at least one clip"):
        sign.latency(network[0], pack, network[1], [])
