"""Generative perplexity: by hand for a judge with known probabilities, against transformers and our own models."""

import itertools
import math

import numpy as np
import pytest
import torch
from judges import EOS_ID, KnownJudge, tiny_gpt2
from small_models import small_model

import adlm
from adlm.apps.judge.generative_perplexity import (
    WindowLayout,
    counted,
    generative_perplexity,
    scoring_convention,
    split_into_windows,
    token_nats,
    truncate_texts,
    window_layout,
)
from adlm.apps.judge.judges import HuggingFaceJudge, OwnJudge
from adlm.errors import UserError
from adlm.tokens import load_tokenizer

TEXTS = ["We the people", "of", "the United States<|endoftext|>in order", "to form a more perfect union, ä€", "!", ""]


def given(judge):
    return window_layout(judge.about, "given", judge.about.context)


def judged(judge, rows, eos="all", batch=4, start="given"):
    reading = window_layout(judge.about, start, judge.about.context)
    read = truncate_texts(rows, reading, None)
    return generative_perplexity(read, token_nats(judge, read, batch, reading), judge.about.eos_id, eos, start)


def test_all_averages_agree_with_a_computation_by_hand():
    """ab has log 4 nats; abaa has log 4 + log 4 + log 2: 3 predictions in the second sample and 1 in the first."""
    found = judged(KnownJudge(), [[0, 1], [0, 1, 0, 0]])
    first, second = math.log(4), (2 * math.log(4) + math.log(2)) / 3
    assert found.pooled.nats == pytest.approx((first + 3 * second) / 4)
    assert found.pooled.value == pytest.approx(math.exp((first + 3 * second) / 4))
    assert found.of_mean_nats.value == pytest.approx(math.exp((first + second) / 2))
    assert found.mean_of_perplexities.value == pytest.approx((math.exp(first) + math.exp(second)) / 2)
    assert (found.num_samples, found.num_tokens, found.num_uncounted) == (2, 4, 0)


def test_the_errors_are_those_of_means_and_of_ratios_over_samples():
    rows = [[0, 1], [0, 1, 0, 0], [2, 2, 2], [1, 3, 0, 0]]
    found = judged(KnownJudge(), rows)
    nats = [row.sum() for row in token_nats(KnownJudge(), rows, 4, given(KnownJudge()))]
    tokens = [len(row) - 1 for row in rows]
    off = [its - found.pooled.nats * num for its, num in zip(nats, tokens, strict=True)]
    expected = math.sqrt(sum(x * x for x in off) * 4 / 3) / sum(tokens)
    assert found.pooled.nats_stderr == pytest.approx(expected, rel=1e-5)
    assert found.pooled.stderr == pytest.approx(expected * found.pooled.value, rel=1e-5)
    means = np.array([its / num for its, num in zip(nats, tokens, strict=True)])
    assert found.of_mean_nats.nats_stderr == pytest.approx(means.std(ddof=1) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "eos", "counts"),
    [
        ("ab.c.a.", "closing", "-xxxxx-"),
        ("ab.c.a", "all", "-xxxxx"),
        ("ab.c.a", "first", "-xx---"),
        ("ab.c.a", "published", "-xxx-x"),
        (".ab.c", "first", "-xxx-"),
        (".ab.c", "published", "-xx-x"),
        ("abc", "published", "-xx"),
        (".", "all", "-"),
        ("", "first", ""),
    ],
)
def test_which_tokens_are_counted_is_chosen_by_name(text, eos, counts):
    ids = KnownJudge().encode([text])[0]
    assert "".join("-x"[int(each)] for each in counted(ids, EOS_ID, eos, "given")) == counts
    after_bos = "".join("-x"[int(each)] for each in counted(ids, EOS_ID, eos, "bos"))
    assert after_bos[1:] == counts[1:] or (text, eos) == (".ab.c", "first")  # that ends with the first eos


def test_the_published_count_is_that_of_the_released_code():
    """It counts, from the second token on, where the cumulative number of eos is one or the token is not eos."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 4, (50, 12), generator=generator)
    released = ((x == EOS_ID).cumsum(-1) == 1)[:, 1:] + (x != EOS_ID)[:, 1:]
    ours = np.stack([counted(row.tolist(), EOS_ID, "published", "given")[1:] for row in x])
    assert (ours == released.numpy()).all()


def test_samples_without_a_counted_token_change_no_metric_and_are_reported():
    rows = [[0, 1], [0, 1, 0, 0]]
    with_them, without = judged(KnownJudge(), [[], *rows, [2]]), judged(KnownJudge(), rows)
    assert with_them.num_uncounted == 2
    assert with_them.pooled == without.pooled
    assert with_them.of_mean_nats == without.of_mean_nats
    alone = judged(KnownJudge(), [[], [2]])
    assert (alone.pooled.value, alone.mean_of_perplexities.value, alone.num_uncounted) == (None, None, 2)


def test_after_bos_the_first_token_counts_and_a_leading_bos_is_not_read_twice():
    rows = [[0], [1, 0]]
    expected = pytest.approx((2 * -math.log(0.4) + math.log(4)) / 3)
    assert judged(KnownJudge(), rows, start="bos").pooled.nats == expected
    assert judged(KnownJudge(), [[EOS_ID, *row] for row in rows], start="bos").pooled.nats == expected
    with pytest.raises(UserError, match="has no bos token"):
        scoring_convention(KnownJudge(bos_id=None).about, "bos", None)


def test_a_final_eos_adds_nats_but_is_not_counted():
    """bos a b eos: log 2.5 + log 4 + log 4 for two tokens."""
    found = judged(KnownJudge(), [[0, 1, EOS_ID]], eos="closing", start="bos")
    assert (found.num_tokens, found.pooled.nats) == (2, pytest.approx((math.log(2.5) + 2 * math.log(4)) / 2))


def test_truncation_keeps_the_first_tokens():
    assert truncate_texts([[0, 1, 2], [1]], given(KnownJudge()), 2) == [[0, 1], [1]]
    assert truncate_texts([[EOS_ID, 0, 1, 2], [1]], WindowLayout(EOS_ID, 8, None), 2) == [[0, 1], [1]]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("room", [2, 3, 4, 5, 8])
def test_windows_predict_every_token_once_after_half_a_window(room, closed, bos):
    for num in range(14):
        row = [0] * num + [EOS_ID] * closed
        reading = WindowLayout(EOS_ID if bos else None, room, EOS_ID if bos else None)
        windows = split_into_windows(0, row, reading)
        assert [place for each in windows for place in range(each.new, each.stop)] == list(range(1 - bos, len(row)))
        for window in windows:
            assert 0 <= window.start <= window.new < window.stop <= len(row)
            assert window.stop - window.start <= room + (closed and bos and window.stop == len(row))
            assert window.start == 0 or window.new - window.start == room // 2


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_neither_windows_nor_batches_change_the_nats_of_a_bigram_judge(batch):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 4, (num,), generator=generator).tolist() for num in (0, 1, 2, 9, 30, 7, 13)]
    found = token_nats(KnownJudge(context=4), rows, batch, given(KnownJudge(context=4)))
    for row, nats in zip(rows, found, strict=True):
        expected = [0.0] * min(1, len(row)) + [-math.log(KnownJudge.table[a, b]) for a, b in itertools.pairwise(row)]
        assert nats == pytest.approx(expected, abs=1e-6)


def test_an_incomplete_last_batch_is_scored():
    judge = KnownJudge()
    found = judged(judge, [[0, 1]] * 7, batch=3)
    assert found.num_samples == 7
    assert sum(shape[0] for shape in judge.shapes) == 7


def test_a_judge_with_nan_nats_is_an_error():
    class Broken(KnownJudge):
        def nats(self, x, pad):
            return super().nats(x, pad) * torch.nan

    with pytest.raises(UserError, match="the judge known gives nan nats for token 1"):
        token_nats(Broken(), [[0, 1]], 1, given(Broken()))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return tiny_gpt2(tmp_path_factory.mktemp("hub") / "gpt2-tiny", positions=48)


def straightforward(folder, texts):
    """The nats of each text by transformers alone: one text at a time, with the model's own loss."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        if ids.shape[1] < 2:
            yield 0.0, 0
            continue
        with torch.no_grad():
            loss = model(ids.long(), labels=ids.long()).loss  # the mean over next tokens
        yield float(loss) * (ids.shape[1] - 1), ids.shape[1] - 1


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_the_nats_of_a_hub_judge_are_those_of_transformers(gpt2, batch):
    judge = HuggingFaceJudge(str(gpt2), torch.device("cpu"))
    rows = judge.encode(TEXTS)
    found = judged(judge, rows, batch=batch)
    pairs = list(straightforward(gpt2, TEXTS))
    nats, tokens = (sum(column) for column in zip(*pairs, strict=True))
    assert found.num_tokens == tokens
    assert found.pooled.value == pytest.approx(math.exp(nats / tokens), rel=1e-6)
    each = [its / num for its, num in pairs if num]
    assert found.of_mean_nats.nats == pytest.approx(np.mean(each), rel=1e-6)
    assert found.mean_of_perplexities.value == pytest.approx(np.mean(np.exp(each)), rel=1e-5)
    assert found.num_uncounted == 2


def test_a_judge_of_the_hub_reads_eos_where_it_is_written_out(gpt2):
    judge = HuggingFaceJudge(str(gpt2), torch.device("cpu"))
    ids = judge.encode(["a<|endoftext|>b"])[0]
    assert ids == [97, 256, 98]
    assert judge.about.tokenizer_sha256 == load_tokenizer("bytes").sha256  # though it was saved by another library


def test_a_judge_without_a_language_model_head_is_rejected(gpt2, tmp_path):
    import transformers

    transformers.BertModel(
        transformers.BertConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=258
        )
    ).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(gpt2).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is not a causal language model: it has no weight"):
        HuggingFaceJudge(str(tmp_path), torch.device("cpu"))


def test_a_bidirectional_model_is_rejected_though_it_has_every_weight(gpt2, tmp_path):
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=258, initializer_range=1.0, **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(gpt2).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is not a causal language model: its logits depend on later tokens"):
        HuggingFaceJudge(str(tmp_path), torch.device("cpu"))


def test_ids_outside_the_vocabulary_of_a_hub_judge_are_rejected(gpt2):
    judge = HuggingFaceJudge(str(gpt2), torch.device("cpu"))
    with pytest.raises(UserError, match="id 300 is not one of the 258 symbols"):
        token_nats(judge, [[1, 300]], 1, given(judge))


def own_judge(folder):
    lm = adlm.load(folder)
    return OwnJudge(str(folder), lm.config, lm.network, lm.tokenizer)


@pytest.mark.parametrize("method", ["ar", "a2r"])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_the_nats_of_our_judge_are_those_of_its_beliefs(tmp_path, method, batch):
    folder = small_model(tmp_path / method, method, length=64)
    judge, lm = own_judge(folder), adlm.load(folder)
    rows = judge.encode(TEXTS)
    for row, nats in zip(rows, token_nats(judge, rows, batch, given(judge)), strict=True):
        if len(row) < 2:
            assert not nats.any()
            continue
        beliefs = lm.log_probs(torch.tensor([row]))[0]
        expected = -beliefs[torch.arange(len(row) - 1), torch.tensor(row[1:])]
        assert nats[1:] == pytest.approx(expected.numpy(), abs=1e-5)


def test_a_judge_of_ours_reads_every_window_after_bos_and_expects_eos_only_at_the_end(tmp_path):
    """[bos], 14 ids and the text's eos in a row of 16, as in training; here with one call per window."""
    folder = small_model(tmp_path / "ar", "ar", length=16)
    judge, lm = own_judge(folder), adlm.load(folder)
    assert scoring_convention(judge.about, None, None) == ("bos", "closing")
    reading = window_layout(judge.about, "bos", judge.about.context)
    text, bos = [*b"We the people of the United States", 256], 256

    def nats(ids):
        beliefs = lm.log_probs(torch.tensor([[bos, *ids]]))[0]
        return (-beliefs[torch.arange(len(ids)), torch.tensor(ids)]).tolist()

    expected = nats(text[:14]) + nats(text[7:21])[7:] + nats(text[14:28])[7:] + nats(text[21:35])[7:]
    assert len(text) == 35
    [found] = token_nats(judge, [text], 1, reading)
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("prompt", [[], [256]])
def test_our_judge_gives_the_perplexity_of_lm_perplexity(tmp_path, prompt):
    """With or without a leading bos; a document of one row, whose eos adds nats but is not counted."""
    folder = small_model(tmp_path / "ar", "ar", length=32)
    judge, lm = own_judge(folder), adlm.load(folder)
    text = [*b"We the people", 256]
    start, eos = scoring_convention(judge.about, None, None)
    found = judged(judge, [[*prompt, *text]], eos=eos, start=start)
    x = torch.tensor([[256, *text]])
    assert found.num_tokens == 13
    assert found.pooled.nats == pytest.approx(float(lm.bound(x).double().sum()) / 13, rel=1e-5)


def test_the_published_convention_stays_that_of_judges_of_the_hub(gpt2):
    judge = HuggingFaceJudge(str(gpt2), torch.device("cpu"))
    assert scoring_convention(judge.about, None, None) == ("given", "published")


def test_a_judge_of_ours_reads_eos_where_it_is_written_out_and_nothing_else_as_special(tmp_path):
    judge = own_judge(small_model(tmp_path / "ar", "ar"))
    assert judge.encode(["a<|endoftext|>[MASK]"]) == [[97, 256, *b"[MASK]"]]


def test_a_judge_must_have_an_exact_likelihood(tmp_path):
    lm = adlm.load(small_model(tmp_path / "adlm", "adlm"))
    with pytest.raises(UserError, match="only bounds a likelihood"):
        OwnJudge("runs/own", lm.config, lm.network, load_tokenizer("bytes"))
    lm = adlm.load(small_model(tmp_path / "ids", "ar", tokenizer=None))
    with pytest.raises(UserError, match="has no tokenizer"):
        OwnJudge("runs/own", lm.config, lm.network, lm.tokenizer)
