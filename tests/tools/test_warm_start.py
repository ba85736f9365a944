"""The tokenizer and the supervised phases: exact text, masks and learning."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import rebuild
import torch
from demo_tokenizer import END_OF_TURN, common_blocks, harness_phrases
from scripted_turns import CLAUDE_CODE, CODEX, FIXED, PI, Tools, ToolTurn, write_script
from training_phases import (
    Example,
    Opening,
    Phase,
    learn,
    new_tokenizer,
    prompted_conversations,
    recorded_sessions,
    relocate,
    render_session,
    solved_conversations,
    tiny_model,
)

from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.demo.tasks import RepairProblem, generate
from tugline.inference.load import load
from tugline.types import Message, Role, Tool, Trace

SYSTEM = (
    "You mend small repositories with the tools below.\n"
    "- Documentation: /opt/agent/node_modules/agent/README.md\n\n"
    "<cwd>\n/opt/me/runs/demo-1/sessions/0123abcd/work\n</cwd>"
)
SCHEMA = {"type": "object", "properties": {"path": {"description": "Path of the file to read"}}}
TOOLS = (Tool("read", "Read the contents of a file.", SCHEMA),)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One tokenizer for all tests, since training it takes seconds."""
    return new_tokenizer([SYSTEM], harness_phrases(SYSTEM, TOOLS), [PI], 1400)


@pytest.fixture(scope="module")
def rendering(tokenizer: Tokenizer) -> Rendering:
    """The demo's chat template."""
    return Rendering(tokenizer, "qwen3", thinking_retention="all")


def opening(problem: RepairProblem) -> Opening:
    """The first prompt of a harness with `SYSTEM` for a problem."""
    messages = (Message(Role.SYSTEM, SYSTEM), Message(Role.USER, problem.instruction))
    return Opening((), messages, TOOLS, problem)


def solved(rendering: Rendering, problem: RepairProblem, tools: Tools = PI) -> Example:
    """A session that solves a problem."""
    script = write_script(problem, tools, random.Random(0))
    return render_session(rendering, opening(problem).messages, TOOLS, script)


def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    """Encoding and decoding give back texts of the tasks and others."""
    texts = [p.instruction + p.files[p.module] for p in islice(generate("heldout", 1), 20)]
    for text in [SYSTEM, "naïve café\t🛷 1234 ';'.join(x)", *texts]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_name_has_the_same_ids_everywhere(tokenizer: Tokenizer) -> None:
    """A space is no part of a word's token, and each digit is a token."""
    word = tokenizer.encode("billing")
    assert len(word) == 1
    for text in ("fix billing.py", '{"path": "billing.py"}', "(billing)"):
        assert word[0] in tokenizer.encode(text)
    assert len(tokenizer.encode("1234")) == 4


def test_a_fixed_line_of_the_harness_is_one_token(tokenizer: Tokenizer) -> None:
    """Text that every session repeats, without its paths, has one id per line."""
    phrases = harness_phrases(SYSTEM, TOOLS)
    assert "You mend small repositories with the tools below." in phrases
    assert "Path of the file to read" in phrases
    assert not any("/opt" in phrase or "/home" in phrase for phrase in phrases)
    assert all(len(tokenizer.encode(phrase)) == 1 for phrase in phrases)


def test_the_mask_covers_exactly_the_answers(rendering: Rendering) -> None:
    """Two tool calls and the final text are trained, each with its end of turn."""
    problem = next(generate("train", 2))
    example = solved(rendering, problem)
    output = rendering.tokenizer.decode(example.ids[example.mask].tolist())
    answers = output.split("<|im_end|>")
    assert len(example.ids) == len(example.mask)
    assert answers[0].startswith('<tool_call>\n{"name": "read"')
    assert answers[1].startswith('<tool_call>\n{"name": "edit"')
    assert answers[2:] == [FIXED, ""]
    assert example.ids[-1] == END_OF_TURN


def test_relocating_a_session_changes_its_paths_only(rendering: Rendering) -> None:
    """Directories are replaced in the prompt; the ids from the first answer on stay."""
    problem = next(generate("train", 2))
    example = solved(rendering, problem)
    other = relocate(example, rendering.tokenizer, random.Random(1))
    text = rendering.tokenizer.decode(other.ids.tolist())
    assert "/opt/agent/" not in text
    assert "/opt/me/" not in text
    assert "/node_modules/agent/README.md" in text
    assert problem.instruction in text
    tail = len(example.ids) - int(np.argmax(example.mask))
    np.testing.assert_array_equal(other.ids[-tail:], example.ids[-tail:])
    np.testing.assert_array_equal(other.mask[-tail:], example.mask[-tail:])
    assert not other.mask[:-tail].any()


def test_decoding_and_encoding_changes_no_id(rendering: Rendering) -> None:
    """A relocated session differs from the first only in its paths."""
    ids = solved(rendering, next(generate("train", 2))).ids
    assert rendering.tokenizer.encode(rendering.tokenizer.decode(ids.tolist())) == ids.tolist()


def test_recorded_traces_are_repeated_in_other_folders(rendering: Rendering) -> None:
    """The examples of the last phase are unlimited, each with another directory."""
    example = solved(rendering, next(generate("train", 4)))
    zeros = np.zeros(len(example.ids), np.float32)
    trace = Trace(ids=example.ids, mask=example.mask, logprobs=zeros, spans=())
    first, second = islice(recorded_sessions([trace], rendering.tokenizer, 0, move=True), 2)
    assert first.ids.tolist() != second.ids.tolist()
    assert first.mask.sum() == second.mask.sum() == example.mask.sum()
    here = next(recorded_sessions([trace], rendering.tokenizer, 0, move=False))
    np.testing.assert_array_equal(here.ids, example.ids)


def test_a_recorded_prompt_is_used_for_other_problems(rendering: Rendering) -> None:
    """The harness's prompt is kept, and nothing of the recorded problem."""
    first = next(generate("train", 2))
    examples = prompted_conversations(rendering, 9, PI, opening(first), move=False)
    for problem, example in zip(islice(generate("train", 9), 5), examples, strict=False):
        text = rendering.tokenizer.decode(example.ids.tolist())
        assert SYSTEM in text
        assert problem.instruction in text
        assert first.instruction not in text


def test_learning_is_reproducible_and_lowers_the_loss(rendering: Rendering) -> None:
    """The same seed gives the same losses, which a few steps lower."""
    phase = Phase(steps=12, batch=4, matrix_lr=0.02, lr=3e-3)
    torch.set_num_threads(1)

    def losses() -> Iterator[float]:
        model = tiny_model(rendering.tokenizer.size, seed=0)
        return learn(model, solved_conversations(rendering, 1, PI), phase)

    whole = list(losses())
    assert list(islice(losses(), 4)) == whole[:4]
    assert whole[-1] < 0.8 * whole[0]


def test_a_right_script_reads_edits_and_stops() -> None:
    """A script with probability 1 is the solution, call by call."""
    problem = next(generate("train", 3))
    read, edit, text = write_script(problem, PI, random.Random(0), p_right=1.0)
    assert isinstance(read, ToolTurn)
    assert isinstance(edit, ToolTurn)
    assert (read.name, json.loads(read.arguments)) == ("read", {"path": problem.module})
    change = {"oldText": problem.solution.old, "newText": problem.solution.new}
    assert json.loads(edit.arguments) == {"path": problem.module, "edits": [change]}
    assert text == FIXED


def test_a_wrong_script_never_solves_the_problem() -> None:
    """If `p_right` is 0, no edit of a script is the solution."""
    rng = random.Random(0)
    for problem in islice(generate("train", 3), 300):
        for turn in write_script(problem, PI, rng, p_right=0.0):
            if isinstance(turn, ToolTurn) and turn.name == "edit":
                edit = json.loads(turn.arguments)["edits"][0]
                assert (edit["oldText"], edit["newText"]) != (
                    problem.solution.old,
                    problem.solution.new,
                )


@pytest.mark.parametrize("tools", [CODEX, CLAUDE_CODE])
def test_shell_commands_make_the_scripted_change(tools: Tools, tmp_path: Path) -> None:
    """The real `cat` and `sed` read and change the file as scripted, also with `*` and `[`."""
    for problem in islice(generate("train", 5), 36):
        module = tmp_path / problem.module
        for edit in (problem.solution, *problem.wrong):
            module.write_text(problem.files[problem.module])
            read, change = tools.read(problem), tools.edit(problem, edit)
            (cat,), (command,) = (json.loads(turn.arguments).values() for turn in (read, change))
            done = subprocess.run(cat, shell=True, cwd=tmp_path, capture_output=True, check=True)  # noqa: S602
            assert done.stdout.decode().rstrip() in read.result
            subprocess.run(command, shell=True, cwd=tmp_path, check=True)  # noqa: S602
            expected = problem.files[problem.module].replace(edit.old, edit.new)
            assert module.read_text() == expected


def test_text_shared_by_two_sessions_has_few_tokens() -> None:
    """Common blocks end where the sessions differ, and at special tokens."""
    fixed = "You mend small repositories with the tools below, and say what was wrong. " * 20
    one, other = (
        f"<|im_start|>system\n{fixed}<|im_end|>\n<|im_start|>user\nFix {name}.<|im_end|>\n"
        for name in ("billing.py", "orders.py")
    )
    blocks = common_blocks(one, other)
    assert blocks == [f"system\n{fixed}".strip()]
    tokenizer = new_tokenizer([one], blocks, [PI], 1400 + len(blocks))
    assert len(tokenizer.encode(one)) < 20
    assert tokenizer.decode(tokenizer.encode(other)) == other


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_warm_start_can_be_rebuilt(tmp_path: Path) -> None:
    """The command, with a real script and a few steps per phase, writes a usable model.

    The test of the benchmark `learn` does it with pi.
    """
    out = tmp_path / "model"
    options = ["--harness", "shell", "--sessions", "2", "--steps", "2", "1", "1"]
    subprocess.run([sys.executable, rebuild.__file__, out, *options], check=True)
    model, tokenizer, eos_ids = load(out, dtype=torch.float32)
    text = "Fixed the bug in billing.py"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert eos_ids == {END_OF_TURN}
    ids = torch.tensor([tokenizer.encode(text)])
    assert torch.isfinite(model(input_ids=ids).logits).all()
