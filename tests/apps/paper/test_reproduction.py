"""The published tables, and the comparison of our results with them."""

from dataclasses import asdict, replace

import pytest

from adlm.apps.judge.pipeline import GPT2_LARGE
from adlm.apps.paper.reproduction import command_for, compare_with_table, compared, row_for
from adlm.apps.paper.results import DECIMALS, JUDGES, TABLES, Result, kind_of, published_sampling, results_of
from adlm.config.load import resolve
from adlm.data.sources.corpora import CORPORA
from adlm.errors import UserError

# As the paper prints them.
OWT = {
    "mdlm-110B": 24.04,
    "adlm-110B": 21.66,
    "ar-262B": 17.54,
    "sedd-262B": 24.10,
    "mdlm-262B": 23.17,
    "two-stage-262B": 21.79,
    "adlm-262B": 20.62,
    "ar-524B": 17.26,
    "mdlm-524B": 22.98,
    "bd3lm-524B": 20.73,
    "adlm-524B": 20.14,
    "ar-110B": 17.94,
    "a2r-110B": 17.29,
    "a2r-262B": 16.23,
    "a2r-524B": 15.86,
}
LM1B = {
    "ar-33B": 22.32,
    "ar-65B": 21.55,
    "sedd-33B": 32.79,
    "mdlm-33B": 27.04,
    "adlm-33B": 26.40,
    "mdlm-65B": 25.49,
    "adlm-65B": 24.46,
}
ZERO_SHOT = {
    "lambada": (44.32, 47.52, 51.28),
    "ptb": (95.37, 95.26, 82.05),
    "wikitext": (31.94, 32.83, 25.75),
    "lm1b": (64.43, 67.01, 51.25),
    "ag_news": (55.72, 61.15, 52.09),
    "pubmed": (37.56, 41.89, 49.01),
    "arxiv": (33.69, 37.37, 41.73),
}
GENERATION = {
    "adlm-1024": (0.699, 25.4, 5.35),
    "adlm-2048": (0.788, 20.3, 5.28),
    "adlm-4096": (0.791, 15.9, 5.19),
    "remdm-4096": (0.656, 17.6, 5.20),
    "ar": (0.760, 12.1, 5.22),
    "data": (1.00, 14.8, 5.44),
}
REASONING = {
    "no-cot": (16.5, 93.8, 76.7),
    "pause": (16.4, 77.7, 75.9),
    "cot": (42.9, 98.8, 77.5),
    "icot": (30.0, 99.8, 98.2),
    "coconut": (34.1, 99.8, 97.0),
    "acot": (45.2, 100.0, 97.3),
}


def _all() -> dict[tuple[str, str, str], float]:
    expected = {("owt-ppl", row, "perplexity"): figure for row, figure in OWT.items()}
    expected |= {("lm1b-ppl", row, "perplexity"): figure for row, figure in LM1B.items()}
    for column, figures in ZERO_SHOT.items():
        expected |= {("zero-shot", row, column): f for row, f in zip(("adlm-524B", "mdlm", "ar"), figures, strict=True)}
    for table, rows, columns in (
        ("generation", GENERATION, ("mauve", "gen-ppl", "entropy")),
        ("reasoning", REASONING, ("gsm8k", "prontoqa", "prosqa")),
    ):
        for row, figures in rows.items():
            expected |= {(table, row, column): figure for column, figure in zip(columns, figures, strict=True)}
    expected["reasoning", "acot", "prosqa_tokens"] = 8.2
    for option, figures in (
        ("gamma", {3e-2: 22.39, 3e-3: 22.32, 3e-5: 23.72}),
        ("tau", {1: 23.17, 5: 22.32, 10: 23.01, 20: 23.98}),
    ):
        expected |= {(option, f"{option}-{value:g}", "perplexity"): figure for value, figure in figures.items()}
    return expected


def finding(row, column, value, stderr=0.1, **more) -> Result:
    return Result("ours", row.method, column, value, {"documents": stderr}, "published", options=row.options, **more)


def every_figure():
    return [
        pytest.param(table, row, column, id=f"{table.name}-{row.name}-{column}")
        for table in TABLES.values()
        for row in table.rows
        for column in row.figures
    ]


def figure(**more) -> dict:
    """A result of `adlm perplexity`, by default with the published protocol on OpenWebText."""
    about = {"parameters": 293_190_000, "symbols": 50_258, "gamma": 3e-3, "tau": 5}
    about |= {"trained_on": "openwebtext", "tokens_trained": 1_000_000 * 512 * 1024}
    report = {"model": "m", "method": "adlm", "data": "openwebtext", "corpus": "openwebtext", "split": "valid"}
    report |= {"perplexity": 20.62, "monte_carlo_stderr": None, "document_stderr": 0.01, "length": 1024}
    report |= {"packing": "packed-published", "estimator": "published", "notes": [], "about": about}
    return report | more


def card(**more) -> dict:
    """A metric card of the published protocol, with the published metrics."""
    sampling = {"sampler": "remdm-loop", "steps": 1024, **published_sampling("remdm-loop")}
    made_by = {"model": "m", "method": "adlm", "canvases": ["[MASK*1024]"], "sampling": sampling}
    made_by["about"] = figure()["about"]
    report = {
        "card": 1,
        "samples": {"num": 5000, "made_by": made_by},
        "perplexity": {"judge": {"name": "gpt2-large"}, "label": None, "pooled": {"value": 25.4, "stderr": 0.2}},
        "mauve": {"featuriser": {"name": "gpt2-large"}, "label": None, "value": 0.699, "spread": 0.01},
        "entropy": {"value": 5.35, "stderr": 0.01, "num": 5000},
    }
    return report | more


def verdicts(table: str, report: dict) -> dict[str, str]:
    found = results_of(report, TABLES[table], "report.json")
    return {
        each.column: each.verdict for each in compare_with_table(TABLES[table], [(found, "")]) if each.ours is not None
    }


def test_the_tables_have_every_published_number_and_no_other():
    held = {
        (table.name, row.name, column): figure
        for table in TABLES.values()
        for row in table.rows
        for column, figure in row.figures.items()
    }
    assert held == _all()


def test_every_number_has_a_unit_a_source_and_the_caveat_of_no_error():
    for table in TABLES.values():
        assert "2505.18456" in table.source
        assert any("no standard error is published" in caveat for caveat in table.caveats)
        for row in table.rows:
            assert isinstance(row.tokens, int | float | None)
            for column, figure in row.figures.items():
                assert round(figure, DECIMALS[table.units[column]]) == figure


def test_the_file_of_tables_is_well_formed():
    """Types that YAML could get wrong: a number such as 3e-3 would be a string."""
    for table in TABLES.values():
        assert table.kind in ("perplexity", "card", "accuracy")
        assert len({row.name for row in table.rows}) == len(table.rows)
        for row in table.rows:
            numbers = {**row.figures, **{name: value for name, value in row.options.items() if name != "sampler"}}
            assert all(isinstance(value, int | float) for value in numbers.values())
            assert all(isinstance(text, str) for text in (row.name, row.title, row.method, *row.caveats))
        if table.protocol is not None and table.kind == "perplexity":
            assert table.protocol.corpora.keys() == table.protocol.splits.keys() == table.units.keys()
            assert all(corpus in CORPORA for corpora in table.protocol.corpora.values() for corpus in corpora)


def test_the_published_judge_has_the_names_that_cards_leave_unlabelled():
    assert tuple(JUDGES) == GPT2_LARGE


def test_the_headline_compares_two_numbers_of_tokens():
    lm1b = {row.name: row for row in TABLES["lm1b-ppl"].rows}
    assert 1 - lm1b["adlm-65B"].figures["perplexity"] / lm1b["sedd-33B"].figures["perplexity"] == pytest.approx(
        0.254, abs=5e-4
    )
    assert any("25.4%" in caveat for caveat in TABLES["lm1b-ppl"].caveats)


@pytest.mark.parametrize(("table", "row", "column"), every_figure())
def test_the_published_number_agrees_with_itself_and_ten_errors_away_does_not(table, row, column):
    published = row.figures[column]
    assert compared(table, row, finding(row, column, published)).verdict == "agrees"
    for sign in (-1, 1):
        away = compared(table, row, finding(row, column, published + sign * 1.0))
        assert away.verdict == "differs"
        assert away.in_errors == pytest.approx(sign * 10)


@pytest.mark.parametrize(("table", "row", "column"), every_figure())
def test_a_result_that_is_not_comparable_never_agrees_nor_differs(table, row, column):
    for value in (row.figures[column], row.figures[column] + 1):
        found = compared(table, row, finding(row, column, value, incomparable=("another text",)))
        assert (found.verdict, found.in_errors) == ("not comparable", None)
        assert "another text" in found.because


def test_agreement_ends_at_two_errors_which_add_in_quadrature():
    table = TABLES["owt-ppl"]
    row = table.rows[0]
    both = replace(
        finding(row, "perplexity", row.figures["perplexity"] + 0.99), errors={"monte_carlo": 0.3, "documents": 0.4}
    )
    assert compared(table, row, both).verdict == "agrees"
    assert compared(table, row, replace(both, value=both.value + 0.02)).verdict == "differs"
    unknown = replace(both, errors={"monte_carlo": None, "documents": None})
    assert compared(table, row, unknown).verdict == "undecided"


def test_the_spread_of_mauve_can_confirm_but_not_refute():
    assert verdicts("generation", card())["mauve"] == "agrees"
    far = {**card()["mauve"], "value": 0.5}
    assert verdicts("generation", card(mauve=far))["mauve"] == "undecided"


def test_a_card_of_the_published_protocol_is_compared_with_the_row_of_its_steps():
    assert verdicts("generation", card()) == {"mauve": "agrees", "gen-ppl": "agrees", "entropy": "agrees"}


@pytest.mark.parametrize(
    ("metric", "who", "column"), [("perplexity", "judge", "gen-ppl"), ("mauve", "featuriser", "mauve")]
)
def test_another_judge_or_featuriser_never_agrees_even_without_a_label(metric, who, column):
    report = card()
    report[metric][who]["name"] = "runs/judge"
    found = verdicts("generation", report)
    assert found.pop(column) == "not comparable"
    assert set(found.values()) == {"agrees"}


def test_samples_of_another_length_are_not_comparable():
    report = card()
    report["samples"]["made_by"]["canvases"] = ["[MASK*128]"]
    assert set(verdicts("generation", report).values()) == {"not comparable"}


OTHER_SETTINGS = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 1.0,
    "nucleus": "crossing",
    "repetition_penalty": 1.2,
    "t_end": 0.0,
    "final": "draw",
    "eta": 0.1,
    "t_on": 0.6,
    "t_off": 0.1,
    "alpha_on": 0.5,
}


@pytest.mark.parametrize("setting", OTHER_SETTINGS)
def test_samples_with_another_sampling_option_are_not_comparable_and_name_it(setting):
    report, table = card(), TABLES["generation"]
    report["samples"]["made_by"]["sampling"][setting] = OTHER_SETTINGS[setting]
    ours = [each for each in compare_with_table(table, [(results_of(report, table, "card.json"), "")]) if each.ours]
    assert {each.row for each in ours} == {"adlm-1024"}
    assert {each.verdict for each in ours} == {"not comparable"}
    assert {each.differs for each in ours} == {
        (f"{setting} {OTHER_SETTINGS[setting]}, not {published_sampling('remdm-loop')[setting]}",)
    }


def test_every_setting_of_the_published_sampling_is_compared():
    """SPEC section 6: the nucleus, the end of the grid, the loop."""
    shaping = {"temperature": 1, "top_k": 0, "top_p": 0.9, "nucleus": "published", "repetition_penalty": 1}
    loop = {"t_end": 1e-5, "final": "argmax", "eta": 0.02, "t_on": 0.55, "t_off": 0.05, "alpha_on": 0.9}
    assert published_sampling("remdm-loop") == shaping | loop
    assert OTHER_SETTINGS.keys() == published_sampling("remdm-loop").keys()


@pytest.mark.parametrize(("option", "value"), [("sampler", "ancestral"), ("steps", 64)])
def test_samples_of_another_sampler_or_number_of_steps_are_not_comparable_with_a_requested_row(option, value):
    report, table = card(), TABLES["generation"]
    report["samples"]["made_by"]["sampling"][option] = value
    [entropy] = [each for each in results_of(report, table, "card.json") if each.column == "entropy"]
    found = compared(table, next(row for row in table.rows if row.name == "adlm-1024"), entropy)
    assert found.verdict == "not comparable"
    assert any(words.startswith(f"{option} {value}, not ") for words in found.differs)


GENERATED = {row.name: row for row in TABLES["generation"].rows if row.method != "data"}


@pytest.mark.parametrize("name", GENERATED)
def test_the_printed_command_and_the_preset_sample_like_the_published_row(name):
    row = GENERATED[name]
    command = command_for(TABLES["generation"], row, "entropy", "MODEL").partition(" && ")[0].split()
    words = [word for word in command if word.startswith("sampling.")]
    for flag in ("sampler", "steps"):
        if f"--{flag}" in command:
            words.append(f"sampling.{flag}={command[command.index(f'--{flag}') + 1]}")
    preset = resolve([f"owt/{row.method}"]).sampling
    for sampling in (resolve(words).sampling, preset):
        settings = asdict(sampling) | {"eta": sampling.strength}
        sampler = "left-to-right" if row.method == "ar" else sampling.sampler
        assert published_sampling(sampler).items() <= settings.items()
        assert settings["sampler"].startswith(row.options.get("sampler", ""))
    if "steps" in row.options:
        assert resolve(words).sampling.steps == row.options["steps"]
        assert preset.steps in {each.options.get("steps") for each in GENERATED.values()}


def test_a_card_has_size_training_and_tokenizer_of_the_model_as_a_perplexity_does():
    table = TABLES["generation"]
    [found] = {
        each.differs for each in compare_with_table(table, [(results_of(card(), table, "card.json"), "")]) if each.ours
    }
    assert found == ()
    report = card()
    report["samples"]["made_by"]["about"] |= {"parameters": 11_000_000, "trained_on": "sotu", "symbols": 258}
    ours = [each for each in compare_with_table(table, [(results_of(report, table, "card.json"), "")]) if each.ours]
    assert {each.verdict for each in ours} == {"not comparable"}
    for each in ours:
        assert "a tokenizer of 258 symbols, not GPT-2's 50,258" in each.because
        assert each.differs == ("11M parameters, not 293.19M", "trained on sotu, not openwebtext")
    report["samples"]["made_by"].pop("about")
    with pytest.raises(UserError, match=r"card.json is incomplete: it has no 'about'; make it again"):
        results_of(report, table, "card.json")


def test_the_reference_of_a_card_is_compared_with_the_row_of_the_data():
    judged = {"perplexity": card()["perplexity"], "entropy": card()["entropy"]}
    about = {"place": "prepared/owt", "source": "openwebtext", "row_length": 1024}
    found = results_of(card(reference=about, reference_judged=judged), TABLES["generation"], "card.json")
    data = [each for each in found if each.method == "data"]
    assert row_for(TABLES["generation"], data[0])[0].name == "data"
    assert {each.column for each in data} == {"gen-ppl", "entropy"}


@pytest.mark.parametrize(
    "more",
    [
        {"corpus": "sotu"},
        {"split": "train"},
        {"length": 512},
        {"packing": "packed"},
        {"packing": "padded"},
        {"notes": ["a stand-in for openwebtext: no figure of a paper compares"]},
        {"about": {**figure()["about"], "symbols": 30_522}},
    ],
    ids=["corpus", "split", "length", "packed", "padded", "stand-in", "tokenizer"],
)
def test_another_text_packing_or_tokenizer_is_not_comparable(more):
    assert verdicts("owt-ppl", {"figures": [figure(**more)]}) == {"perplexity": "not comparable"}
    assert verdicts("owt-ppl", {"figures": [figure()]}) == {"perplexity": "agrees"}


def test_settings_that_differ_are_named():
    about = {**figure()["about"], "parameters": 170_000_000, "trained_on": "sotu", "tokens_trained": 10**9, "tau": 10}
    report = {"figures": [figure(about=about, estimator="nelbo")]}
    [found] = results_of(report, TABLES["owt-ppl"], "report.json")
    row = next(row for row in TABLES["owt-ppl"].rows if row.name == "adlm-262B")
    said = "; ".join(compared(TABLES["owt-ppl"], row, found).differs)
    for words in ("170M parameters", "0.5B tokens", "tau 10", "estimator nelbo", "trained on sotu"):
        assert words in said
    [same] = results_of({"figures": [figure()]}, TABLES["owt-ppl"], "report.json")
    assert compared(TABLES["owt-ppl"], row, same).differs == ()


@pytest.mark.parametrize(
    ("table", "more", "row"),
    [
        ("owt-ppl", {}, "adlm-262B"),
        ("owt-ppl", {"tokens_trained": 2_000_000 * 512 * 1024}, "adlm-524B"),
        ("owt-ppl", {"gamma": 0.0}, "two-stage-262B"),
        ("gamma", {"gamma": 3e-5}, "gamma-3e-05"),
        ("tau", {"tau": 20}, "tau-20"),
    ],
)
def test_the_row_of_a_model_is_found_by_method_options_and_tokens(table, more, row):
    report = {"figures": [figure(about=figure()["about"] | more)]}
    found, why = row_for(TABLES[table], results_of(report, TABLES[table], "report.json")[0])
    assert found.name == row
    assert why


def test_the_paper_counts_every_token_of_causal_models_and_half_of_masked_ones():
    about = figure()["about"] | {"tokens_trained": 500_000 * 512 * 1024}
    report = {"figures": [figure(method="ar", about=about)]}
    assert row_for(TABLES["owt-ppl"], results_of(report, TABLES["owt-ppl"], "report.json")[0])[0].name == "ar-262B"


@pytest.mark.parametrize(
    ("table", "more", "sentence"),
    [
        ("owt-ppl", {"tokens_trained": None}, "give --row, one of adlm|several rows"),
        ("gamma", {"gamma": 1e-2}, "several rows of method adlm"),
    ],
)
def test_an_ambiguous_row_is_an_error_that_names_the_rows(table, more, sentence):
    report = {"figures": [figure(about=figure()["about"] | more)]}
    with pytest.raises(UserError, match=sentence):
        row_for(TABLES[table], results_of(report, TABLES[table], "report.json")[0])


def test_a_method_without_a_row_and_a_row_without_a_name_list_the_rows():
    found = replace(results_of({"figures": [figure()]}, TABLES["owt-ppl"], "report.json")[0], method="d3pm")
    with pytest.raises(UserError, match=r"no row of method d3pm.*adlm-262B"):
        row_for(TABLES["owt-ppl"], found)
    with pytest.raises(UserError, match=r"did you mean 'adlm-262B'.*bd3lm-524B"):
        row_for(TABLES["owt-ppl"], found, "adlm-262")


def test_accuracies_have_a_binomial_error():
    report = {"method": "acot", "accuracy": {"gsm8k": {"right": 596, "of": 1319}, "prosqa": {"right": 500, "of": 500}}}
    gsm8k, prosqa = results_of(report, TABLES["reasoning"], "report.json")
    assert gsm8k.stderr == pytest.approx(100 * (0.452 * 0.548 / 1319) ** 0.5, rel=0.01)
    assert prosqa.stderr > 0  # all right is not certainty
    assert verdicts("reasoning", report) == {"gsm8k": "agrees", "prosqa": "differs"}


def test_missing_results_have_the_command_that_makes_them():
    report = {"figures": [figure(corpus="ptb", perplexity=95.0)]}
    found = results_of(report, TABLES["zero-shot"], "report.json")
    rows = compare_with_table(TABLES["zero-shot"], [(found, "")])
    assert sum(len(row.figures) for row in TABLES["zero-shot"].rows) == len(rows)
    missing = {(each.row, each.column): each.command for each in rows if each.verdict == "missing"}
    assert "adlm perplexity m --data lambada" in missing["adlm-524B", "lambada"]
    assert missing["ar", "ptb"].startswith("adlm train owt/ar")


def test_other_json_has_no_kind():
    assert [kind_of(report) for report in ([], {}, {"figures": []}, {"card": 2}, {"accuracy": {}})] == [None] * 5
    with pytest.raises(UserError, match="is of `adlm judge --out`"):
        results_of(card(), TABLES["owt-ppl"], "card.json")
