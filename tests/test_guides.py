"""docs/guides.md is true: each of its commands is translated and runs on the guide's own folders, and each row of its
tables says what `python -m nbtools guide` makes of an option."""

import re
import shlex
import shutil
from pathlib import Path

import guide_layouts
import pytest

import nbtools as nb
from nbtools import guides
from nbtools.__main__ import main, parser
from nbtools.errors import NbtoolsError

TEXT = (Path(__file__).parent.parent / "docs" / "guides.md").read_text()
CONFIG = """
## bisenetv2
cfg = dict(
    model_type='bisenetv2',
    n_cats=3,
    num_aux_heads=4,
    lr_start = 5e-3,  # at batch 16
    weight_decay=5e-4,
    warmup_iters=1000,
    im_root='./garments',
    train_im_anns='./garments/train.txt',
    val_im_anns='./garments/val.txt',
    scales=[0.75, 2.],
    cropsize=[64, 64], #[512, 1024],
    eval_scales=[1.0],
    ims_per_gpu=8,
    use_fp16=True,
    use_sync_bn=False,
)
"""
FEW = ["--epochs", "1", "--batch-size", "4", "--micro-batch-size", "2", "--no-receipt"]


def commands(text: str = TEXT) -> list[list[str]]:
    """What follows `python -m nbtools` in the code blocks."""
    found = re.findall(r"^    python -m nbtools ((?:.*\\\n)*.*)", text, re.M)
    return [shlex.split(command.replace("\\\n", " ")) for command in found]


def sections() -> dict[str, str]:
    return dict(part.split("\n", 1) for part in TEXT.split("\n## ")[1:])


def rows() -> list[tuple[str, str, str]]:
    """(a program of the section, options as they are typed, what the table says) of each option of each table."""
    found = []
    for part in sections().values():
        programs = sorted({guides.program_in(words[1:])[1] for words in commands(part)})
        longest = max(programs, key=lambda one: len(guides.PROGRAMS[one][1]))
        for theirs, ours in re.findall(r"^\| (.*?) \| (.*) \|$", part, re.M):
            for typed in re.findall(r"`([^`]+)`", theirs):
                name = typed.split()[0].partition("=")[0]
                has = [one for one in programs if name in guides.named(guides.PROGRAMS[one][1])]
                if has or name.startswith("-"):
                    same = ours.startswith("the same")
                    found.append((*(*has, longest)[:1], typed, f"`{typed}`" if same else ours))
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folders that the guides' commands name."""
    folder = tmp_path_factory.mktemp("home")
    guide_layouts.captcha_folders(folder, 24).rename(folder / "dataset")
    guide_layouts.hwdb_full(folder / "data", 5)
    (folder / "data" / "pages").rename(folder / "pages")
    guide_layouts.sign_folders(folder)
    guide_layouts.segment_lists(folder)
    (folder / "configs").mkdir()
    (folder / "configs" / "garments.py").write_text(CONFIG)
    return folder


@pytest.fixture(autouse=True)
def at_home(request, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    if "home" in request.fixturenames:
        monkeypatch.chdir(request.getfixturevalue("home"))


def short(words: list[str]) -> str:
    return " ".join(words[1:])[:60]


def several(words: list[str]) -> bool:
    return re.search("a100|torchrun|0,1,2|-distributed|--enable-parallel", " ".join(words)) is not None


@pytest.mark.parametrize("words", commands(), ids=short)
def test_every_command_is_one_of_ours(words, home):
    ours = guides.translate([word for word in words[1:] if word != "--print"]).words
    options = parser(ours).parse_args(ours)
    assert options.act
    assert getattr(options, "processes", 1) == 1 or several(words)


@pytest.mark.parametrize(("program", "typed", "said"), rows(), ids=str)
def test_a_row_of_the_tables_says_what_becomes_of_an_option(program, typed, said):
    words = [f"{program}.py", *shlex.split(typed)]
    if said.startswith("refused"):
        with pytest.raises(NbtoolsError, match=re.escape(typed)):
            guides.translate(words)
    elif said.startswith("`-"):
        expected = guides.Translation()
        expected.add(re.findall("`([^`]+)`", said)[0], "")
        made = guides.translate(words).ours
        assert {option: made.get(option) for option in expected.ours} == expected.ours
    else:
        assert typed.split()[0].partition("=")[0] in " ".join(guides.translate(words).notes)


def test_every_option_and_program_of_the_tables_is_in_the_document():
    theirs = " ".join(typed for _, typed, _ in rows())
    for program, (_, table) in guides.PROGRAMS.items():
        assert f"{program}.py" in TEXT or f"preprocessing.{program}" in TEXT
        for names in {} if program == "preprocess_all_hwdb" else table:
            there = [name for name in names.split() if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", theirs)]
            assert there, names


def run(words: list[str], capsys) -> None:
    """Run a command with few epochs and samples, in a new run folder; one for several GPUs in two processes."""
    ours = guides.translate(words[1:]).ours
    few = [*FEW, *(["--workers", "1"] if "--workers" in ours else [])]
    few += ["--processes", "2"] if several(words) else []
    if ours[""][0] == "train":
        shutil.rmtree(ours["--run"][0], ignore_errors=True)
        words = words if "--smoke-test" in ours else [*words, *few]
    assert main(words) == 0
    found = guides.translate(words[1:])
    assert capsys.readouterr().err.startswith(f"{found}\n")
    if several(words):
        assert found.ours["--processes"] == ["2"]
        assert len(nb.Run.open(found.ours["--run"][0]).summary()) == 1


def test_some_commands_run_on_the_guides_own_folders(home, capsys):
    some = [words for words in commands() if re.search("validate_npz|check_gpu|preprocess|3e-4", str(words))]
    assert len(some) == 5
    for words in some:
        run([word for word in words if word != "--compile-model"], capsys)  # which takes a minute of C++
    assert (home / "runs" / "transformer" / "history.csv").exists()
    assert (home / "data" / "hwdb20_only" / "pack.json").exists()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("words", commands("\n## ".join(sections().values())), ids=short)
def test_every_command_runs_on_the_guides_own_folders(words, home, capsys):
    if "captcha_test.py" in words:
        run(["guide", "captcha_train.py"], capsys)
    run(words, capsys)


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("training/train.py --pin-memry", "no option --pin-memry; did you mean --pin-memory?"),
        ("training/train.py --model lstm", "--model must be transformer or iv3_gru, got 'lstm'"),
        ("training/train.py --model", "expected one argument"),
        ("training/train.py --resume SignTransformer_last.pt", "another program's checkpoint"),
        ("main.py -x 3", "main.py takes no -x"),
        ("main.py -d x --gpu 1", "write CUDA_VISIBLE_DEVICES=1 before python"),
        (
            "torchrun --nnodes 2 captcha_train.py",
            "docs/several.md says how several machines train; on this one: python",
        ),
        ("captcha_train.py --processes all", "must be whole numbers, got 128, 1 and all; name them all"),
        ("main.py -d x --processes all", "argument --processes: invalid int value: 'all'"),
        ("ims_per_gpus=4 use_fp16=True", "takes no ims_per_gpus=4; did you mean ims_per_gpu?"),
        ("ims_per_gpu=4 gradient_accumulation_steps=x", "must be whole numbers, got 4, x and 1; name them all"),
        (
            "tools/train_amp.py --config no/such.py",
            "no/such.py is neither a program of a guide nor a file with settings",
        ),
        ("something.sh", "name a program of a guide, got 'something.sh': "),
        ("", "name a program of a guide, got nothing: "),
        ("captcha_train_a100_optimized.py accumulation_steps=2", "must be whole numbers, got none, 2 and 1"),
    ],
)
def test_what_no_command_of_ours_can_do_is_a_sentence(typed, sentence, capsys):
    try:
        code = main(["guide", *typed.split()])
    except SystemExit as end:  # of our own command, which knows its options
        code = end.code
    assert code in (1, 2)
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("train sign --amp", "--amp is --amp bf16 here"),
        ("train sign --amp --compile-model", "--amp is --amp bf16 here"),
        (
            "train sign --compile-model --num-gloss 105",
            "--compile-model is --compile here; --num-gloss is --glosses 105",
        ),
        ("train sign --grad-clip 1", "--grad-clip is --clip-norm 1 here"),
        (
            "train sign --gradient-accumulation-steps 2",
            "--gradient-accumulation-steps 2: --batch-size is what an update sees",
        ),
        ("train sign --enable-parallel", "--enable-parallel is --processes 1 here"),
        ("train hwdb --gpu 0,1,2", "--gpu is --processes 3 here"),
        ("train sign --batch-siz 4", "no option --batch-siz; did you mean --batch-size?"),
        ("train sign --batch 4", "no option --batch; did you mean --batch-size?"),
        ("train sign --lr", "argument --lr: expected one argument"),
        ("train hwdb -lr 0.003", "-lr is --lr 0.003 here"),
        ("train segment ims_per_gpu=4", "ims_per_gpu is --batch-size 4 here"),
        ("pack captcha x --nosuch 1", "no option --nosuch"),
        ("pack sign x --amp", "no option --amp."),
        ("pack sign x --labels-train-csv F", "--labels-train-csv is --labels F here"),
        ("pack hwdb x -m hctr", "-m is --height 128 here"),
    ],
)
def test_a_guides_option_given_to_our_own_command_is_answered_with_ours(typed, sentence, capsys):
    with pytest.raises(SystemExit) as end:
        main(typed.split())
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"nbtools: {sentence}")
    assert said.count("\n") == 1


ULTRA = "captcha_train_a100_ultra_optimized.py"


@pytest.mark.parametrize(
    ("typed", "batch", "micro", "processes"),
    [
        (ULTRA, 3072, 1024, 3),
        (f"{ULTRA} batch_size=896", 2688, 896, 3),
        (f"{ULTRA} batch_size=512 accumulation_steps=2", 3072, 512, 3),
        (f"torchrun --nproc_per_node=2 {ULTRA}", 2048, 1024, 2),
        (f"{ULTRA} --processes 2", 2048, 1024, 2),
        (f"torchrun --nproc_per_node 1 {ULTRA}", 1024, None, 1),
        ("CUDA_VISIBLE_DEVICES=0,1 python captcha_train.py", 256, 128, 2),
        ("python -m torch.distributed.launch --nproc_per_node 3 captcha_train.py", 384, 128, 3),
        ("torchrun --standalone --nproc_per_node=gpu captcha_train.py", 128, None, 1),
        ("captcha_train_a100_optimized.py", None, None, 3),
        ("captcha_train_a100_optimized.py batch_size=256 accumulation_steps=2", 512, 256, 3),
        ("main.py -d x -b 64 -j 8 --gpu 0,1,2", 64, None, 3),
        ("training/train.py --enable-parallel --batch-size 64 --gradient-accumulation-steps 2", 128, 64, 1),
        ("torchrun --nproc_per_node=2 tools/train_amp.py ims_per_gpu=8 gradient_accumulation_steps=2", 32, 8, 2),
    ],
)
def test_the_batch_of_each_gpu_becomes_the_effective_one_and_that_of_all_stays(typed, batch, micro, processes):
    words = guides.translate(typed.split()).words
    options = vars(parser(words).parse_args(words))
    sizes = (None if value is None else str(value) for value in (batch, micro))
    assert [options.get("knob_batch_size"), options.get("knob_micro_batch_size")] == [*sizes]
    assert options["processes"] == processes
    if "-j" in typed:
        assert options["knob_workers"] == "3", "8 are those of all three, as in the guide"


@pytest.mark.parametrize(("here", "count"), [(0, 3), (1, 1), (2, 2), (3, 3), (8, 3)])
def test_fewer_gpus_than_in_the_guide_train_with_the_same_batch_and_lr(here, count, monkeypatch):
    monkeypatch.setattr(guides, "gpus", lambda: here)
    found = guides.translate([ULTRA])
    given = {name: found.ours[name] for name in ("--batch-size", "--micro-batch-size", "--lr")}
    assert given == {"--batch-size": ["3072"], "--micro-batch-size": ["1024"], "--lr": ["0.0006"]}
    assert found.ours.get("--processes", ["1"]) == [str(count)]
    notes = {0: ["without a GPU: 3 processes on this CPU, through gloo"]} | {
        one: [f"3 GPUs there, {one} here: the effective batch, and with it lr, stays the same"] for one in (1, 2)
    }
    assert found.notes == notes.get(here, [])
    synced = guides.translate(["torchrun", "--nproc_per_node=2", "tools/train_amp.py", "use_sync_bn=True"])
    assert ("--sync-batchnorm" in synced.ours) == (here > 1)
    alone = guides.translate(["training/train.py", "--enable-parallel"])
    assert alone.ours.get("--processes", ["1"]) == [str(max(1, here))]


@pytest.mark.parametrize("typed", ["--print main.py -d x", "main.py -d x --print", "--print -m main -d x"])
def test_print_only_shows_our_command(typed, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["guide", *typed.split()]) == 0
    assert capsys.readouterr().out.startswith("python -m nbtools train hwdb --run runs/hwdb --from baseline ")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("set.yaml", "# fast\nims_per_gpu: 8  # twice as many\nscales: [0.75, 2.]\nim_root: 'my garments'\n"),
        ("set.json", '{\n  "ims_per_gpu": 8,\n  "scales": [0.75, 2.0],\n  "im_root": "my garments"\n}\n'),
        ("set.py", "ims_per_gpu = 8\nscales = (0.75, 2.)\n\nim_root = 'my garments'\n"),
    ],
)
def test_a_config_may_be_yaml_json_or_python(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    ours = guides.translate([str(tmp_path / name)]).ours
    assert (ours["--batch-size"], ours["--scale-low"], ours["--scale-high"]) == (["8"], ["0.75"], ["2.0"])
    assert ours["--data"] == ["my garments"]


def test_an_interrupted_command_of_a_guide_has_our_exit_code(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("nbtools.__main__.check", interrupt)
    assert main(["guide", "check_gpu.py"]) == 130
    assert capsys.readouterr().err == "python -m nbtools gpus\nnbtools: stopped by you\n"
