"""docs/guides.md is true: each of its commands is translated and runs on the guide's own folders, and each row of its
tables says what `python -m nbtools guide` makes of an option."""

import re
import shlex
import shutil
from pathlib import Path

import guide_layouts
import pytest

from nbtools import guides
from nbtools.__main__ import main, parser
from nbtools.errors import NbtoolsError

pytestmark = pytest.mark.usefixtures("one_thread", "undrawn")
TEXT = (Path(__file__).parent.parent / "docs" / "guides.md").read_text()
LATER = "several GPUs come with a later version of nbtools; on one: python -m nbtools train "
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
    return re.search("ultra|torchrun|--enable-parallel", " ".join(words)) is not None


@pytest.mark.parametrize("words", commands(), ids=short)
def test_every_command_is_one_of_ours(words, home):
    if several(words):
        with pytest.raises(NbtoolsError, match=LATER) as refused:
            guides.translate(words[1:])
        ours = shlex.split(str(refused.value).partition(LATER.removesuffix("train "))[2])
    else:
        ours = guides.translate([word for word in words[1:] if word != "--print"]).words
    assert parser(ours).parse_args(ours).act


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
    """Run a command with few epochs and samples, in a new run folder; or see that several GPUs are for later."""
    if several(words):
        assert main(words) == 1
        assert LATER in capsys.readouterr().err
        return
    ours = guides.translate(words[1:]).ours
    few = [*FEW, *(["--workers", "1"] if "--workers" in ours else [])]
    if ours[""][0] == "train":
        shutil.rmtree(ours["--run"][0], ignore_errors=True)
        words = words if "--smoke-test" in ours else [*words, *few]
    assert main(words) == 0
    assert capsys.readouterr().err.startswith(f"{guides.translate(words[1:])}\n")


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
        ("main.py -d x --gpu 0,1,2", LATER + "hwdb"),
        ("main.py -d x --gpu 1", "write CUDA_VISIBLE_DEVICES=1 before python"),
        ("CUDA_VISIBLE_DEVICES=0,1 python captcha_train.py", LATER + "captcha"),
        ("python -m torch.distributed.launch --nproc_per_node 3 captcha_train.py", LATER + "captcha"),
        ("ims_per_gpus=4 use_fp16=True", "takes no ims_per_gpus=4; did you mean ims_per_gpu?"),
        ("ims_per_gpu=4 gradient_accumulation_steps=x", "must be whole numbers, got 4 and x"),
        (
            "tools/train_amp.py --config no/such.py",
            "no/such.py is neither a program of a guide nor a file with settings",
        ),
        ("something.sh", "name a program of a guide, got 'something.sh': "),
        ("", "name a program of a guide, got nothing: "),
        ("captcha_train_a100_optimized.py accumulation_steps=2", "must be whole numbers, got none and 2; name both"),
        (
            "captcha_train_a100_ultra_optimized.py batch_size=896",
            " --batch-size 2688 --lr 0.0006 --micro-batch-size 896",
        ),
        (
            "captcha_train_a100_ultra_optimized.py batch_size=512 accumulation_steps=2",
            " --batch-size 3072 --lr 0.0006 --micro-batch-size 512",
        ),
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
        ("train sign --enable-parallel", "--enable-parallel: several GPUs come with a later version of nbtools"),
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
