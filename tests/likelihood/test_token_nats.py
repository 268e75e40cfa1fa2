"""The bound of one text, token by token."""

import pytest
import torch
from small_models import small_model

import adlm
from adlm.errors import UserError
from adlm.likelihood.measurement import draw_token_nats, mean_token_nats, token_row


def nats_of(lm, text, samples=64):
    row = token_row(lm.method, text, lm.tokenizer)
    drawn = torch.cat(list(draw_token_nats(lm.method, lm.network, row, samples)))
    return row, drawn, mean_token_nats(lm.method, row, drawn)


def test_the_nats_of_a_causal_model_are_its_log_probabilities(tmp_path):
    lm = adlm.load(small_model(tmp_path / "ar", "ar"))
    row, drawn, found = nats_of(lm, "abc")
    log_probs = lm.log_probs(row.x)[0, :-1].gather(1, row.x[0, 1:, None])[:, 0]
    assert len(drawn) == 1
    assert found.nats[0] == 0, "bos is given"
    torch.testing.assert_close(found.nats[1:].float(), -log_probs)
    assert found.total_stderr == 0


def test_a_uniform_denoiser_pays_log_v_for_every_token(tmp_path):
    lm = adlm.load(small_model(tmp_path / "mdlm", "mdlm"))
    with torch.no_grad():
        for weight in lm.network.parameters():
            weight.zero_()
    _, drawn, found = nats_of(lm, "abc", samples=4096)
    log_v = torch.tensor(lm.config.vocabulary.size - 1.0).log()  # all but the mask
    assert len(drawn) == 4096
    assert ((found.nats - log_v).abs() < 5 * found.stderr + 0.01).all()
    assert found.stderr.max() < 0.2


def test_a_text_of_more_than_one_row_is_a_user_error(tmp_path):
    lm = adlm.load(small_model(tmp_path / "mdlm", "mdlm", length=16))
    with pytest.raises(UserError, match="rows of the model's length 16; shorten it"):
        token_row(lm.method, "x" * 16, lm.tokenizer)
