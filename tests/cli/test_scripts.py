"""Shell scripts: which command is read, with which values, and what is said of the rest."""

from __future__ import annotations

import subprocess
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from batchwright.cli.files import read_keys
from batchwright.cli.scripts import read_script
from batchwright.cli.shell import commands, words
from batchwright.core.errors import ConfigError

RUN = "torchrun --nproc_per_node 8 pretrain_gpt.py"
BATCH = "--micro-batch-size 2 --global-batch-size 64"
MORE = f"{BATCH} --seq-length 4096"
HF = "torchrun --nproc_per_node 8 train.py --output_dir o"


def checked(cli, tmp_path, text):
    (tmp_path / "run.sh").write_text(text)
    return cli("check", str(tmp_path / "run.sh"))


@pytest.mark.parametrize(
    ("script", "equation"),
    [
        # a `#` inside a word is no comment
        (f"{HF} --run_name sweep#3 \\\n --per_device_train_batch_size 4 \\\n --gradient_accumulation_steps 16\n", "512 = 4"),
        (f"torchrun --nproc_per_node 8 --nnodes ${{#HOSTS[@]}} pretrain_gpt.py {MORE}\n", "64 = 2 micro × accumulation"),
        # a comment ends with its line, also after a backslash
        (
            "ARGS=(\n --per_device_train_batch_size 4 \\\n # --bf16 \\\n --gradient_accumulation_steps 16 \\\n)\n"
            f'{HF} "${{ARGS[@]}}"\n',
            "512 = 4 micro × 16",
        ),
        (f"# old:\n# torchrun t.py \\\n#  --per_device_train_batch_size 1 \\\n{HF} --per_device_train_batch_size 4\n", "32 = 4"),
        # the command of a shell's -c, and of eval
        (f'srun -N 4 --ntasks-per-node 8 bash -c "python pretrain_gpt.py {MORE}"\n', "64 = 2 micro × 1 accumulation × 32"),
        (f"srun -N 2 bash -lc 'cd /x && {RUN} {MORE}'\n", "64 = 2 micro × 2 accumulation × 16"),
        (f'OPTS="{MORE}"\neval "{RUN} $OPTS"\n', "64 = 2 micro × 4 accumulation × 8"),
        (f"OPTS=\"{MORE}\"\nrun=\"bash -c 'python pretrain_gpt.py $OPTS'\"\nsrun -N 2 --ntasks-per-node 8 $run\n", "× 16"),
        # other commands of the script
        (f"for g in 64 128; do\n  {RUN} {MORE}; done\n", "64 = 2 micro × 4 accumulation × 8"),
        (f"{RUN} {MORE} ; echo done --micro-batch-size 9\n", "64 = 2 micro × 4 accumulation × 8"),
        (f"echo {RUN} --micro-batch-size 1\n{RUN} {MORE}\n", "64 = 2 micro × 4 accumulation × 8"),
        (f"ray start --head --num-gpus 4\npython tools/pre.py --workers 4 --micro-batch-size 7\n{RUN} {MORE}\n", "64 = 2"),
        (f"{HF} --per_device_train_batch_size 4 2>&1 | tee log --append\npython eval.py --batch_size 9\n", "32 = 4 micro"),
        (f'CMD="{RUN} {MORE}"\necho $CMD\neval $CMD\n', "64 = 2 micro × 4 accumulation × 8"),
        (f'CMD="{RUN} {MORE}"\nif x; then\n  eval "cd /x; $CMD"\nfi\n', "64 = 2 micro × 4 accumulation × 8"),
        (f"sbatch <<END\n#!/bin/bash\nN=8\nsrun -N 2 torchrun --nproc_per_node $N pretrain_gpt.py {MORE}\nEND\n", "× 16"),
        (f"cat <<END | bash\n{RUN} {MORE}\nEND\n", "64 = 2 micro × 4 accumulation × 8"),
        (f"cat >old.sh <<END\n{RUN} --micro-batch-size 1\nEND\n{RUN} {MORE}\n", "64 = 2 micro × 4 accumulation × 8"),
        (f"A=(--global-batch-size=64 --micro-batch-size=1)\n{RUN} --micro-batch-size=2 $A\n", "64 = 2 micro × 4"),
        (f"{RUN} \\\r\n {MORE}\r\n", "64 = 2 micro × 4 accumulation × 8"),
        # values that are written once
        (f"N=8\ntorchrun --nproc_per_node=$N pretrain_gpt.py {MORE}\n", "64 = 2 micro × 4 accumulation × 8"),
        ('TP=2\nMBS="4"\nOPTS=" --tensor-model-parallel-size ${TP} --micro-batch-size ${MBS} --global-batch-size 32 "\n'
         f"{RUN} $OPTS\n", "32 = 4 micro × 2 accumulation × 4"),
        (f"N=8\ntorchrun --nproc_per_node ${{N:-4}} pretrain_gpt.py {MORE}\n", "× 8 data-parallel"),
        # texts for other programs, quotes and brackets
        (f"usage() {{ cat <<USAGE\nit's: $0 [--help]\nUSAGE\n}}\nOPTS=({MORE})\n{RUN} ${{OPTS[@]}}\n", "64 = 2 micro × 4"),
        (f'DATA=(--name "x (y")\nOPTS=({MORE})\n{RUN} ${{DATA[@]}} ${{OPTS[@]}}\n', "64 = 2 micro × 4 accumulation × 8"),
        (f"OPTS=$(cat <<END\n{MORE}\nEND\n)\n{RUN} $OPTS\n", "64 = 2 micro × 4 accumulation × 8"),
        (f'OPTS=({MORE})\n{RUN} ${{OPTS[@]+"${{OPTS[@]}}"}} > "$(date "+%F %T").log" 2>&1 &\n', "64 = 2 micro × 4"),
        (f"readonly OPTS=({MORE})\nexec {RUN} \"${{OPTS[@]}}\" >\"${{LOG}}\" 2>&1 &\n", "64 = 2 micro × 4"),
    ],
)  # fmt: skip
def test_the_command_that_trains_is_read(cli, tmp_path, script, equation):
    ran = checked(cli, tmp_path, script)
    assert ran.code == 0 and equation in ran.out, ran


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"MBS=(1 2 4)\n{RUN} --micro-batch-size ${{MBS[2]}} --global-batch-size 64\n", "${MBS[2]}' is known only when"),
        (f"MBS=(1 2 4)\n{RUN} --micro-batch-size ${{MBS[$i]}} --global-batch-size 64\n", "${MBS[$i]}' is known only when"),
        ("if x; then\nM=2\nelse\nM=4\nfi\n" + f"{RUN} --micro-batch-size $M --global-batch-size 64\n",
         "run.sh: M is set in lines 2 and 4, so its value is not known"),
        ("A=2\nM=$A\nif x; then M=4; fi\n" + f"{RUN} --micro-batch-size $M --global-batch-size 64\n",
         "run.sh: M is set in lines 2 and 3, so its value is not known"),
        (f"for M in 2 4; do {RUN} --micro-batch-size $M --global-batch-size 64; done\n", "'$M' is known only when the job"),
        (f"M=$((2 * 2))\n{RUN} --micro-batch-size $M --global-batch-size 64\n", "Give the number, such as micro_batch_size="),
    ],
)  # fmt: skip
def test_a_value_that_only_the_shell_knows_is_no_number(cli, tmp_path, script, said):
    ran = checked(cli, tmp_path, script)
    assert ran.code == 5 and said in " ".join(ran.out.split()), ran
    assert "1 micro" not in ran.out
    assert cli("check", str(tmp_path / "run.sh"), "micro_batch_size=4").code == 0


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"if x; then\n  ARGS=({BATCH})\nelse\n  ARGS=({BATCH} --bf16)\nfi\n{RUN} ${{ARGS[@]}}\n",
         "run.sh: ARGS is set in lines 2 and 4, and line 4 is read"),
        (f'ARGS="{BATCH}"\nif x; then ARGS="${{ARGS/size 2/size 1}}"; fi\n{RUN} $ARGS\n',
         "run.sh: ARGS is set in lines 1 and 2, and line 1 is read"),
        (f"{RUN} $GPT_ARGS {BATCH}\n", "run.sh: only the shell knows $GPT_ARGS, so flags in it are not read"),
        (f'ARGS="{BATCH}"\nARGS+=" $MORE"\n{RUN} $ARGS\n', "run.sh: only the shell knows $MORE, so flags in it are not read"),
        (f'OPT=${{OPT:-"--bf16 --micro-batch-size 1"}}\n{RUN} {BATCH} $OPT\n', "only the shell knows $OPT"),
        (f"{RUN} {BATCH}\n--seq-length 4096\n", "run.sh: line 2 begins with a flag and belongs to no command"),
        (f"N=${{N:-8}}\n{RUN} --nnodes $N {BATCH}\n", "nnodes=$N is known only when the job runs"),
        (f"accelerate launch --config_file $ACC {RUN} {BATCH}\n",
         "config_file=$ACC is known only when the job runs, so the keys of that file are not read"),
        (f"{RUN} --deepspeed ${{DS:-ds.json}} {BATCH}\n", "deepspeed=${DS:-ds.json} is known only when the job runs"),
        (f"C=gone.yaml\n{RUN} --config $C {BATCH}\n", "gone.yaml is not a file here, so its keys are not read"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_said(cli, tmp_path, script, said):
    ran = checked(cli, tmp_path, script)
    assert ran.code == 0 and "64 = 2 micro" in ran.out and said in " ".join(ran.out.split()), ran
    planned = cli("plan", str(tmp_path / "run.sh"), "--devices", "8", "--nodes", "1")
    assert said in " ".join(planned.out.split()), planned


def test_two_commands_with_different_flags_are_never_mixed(cli, tmp_path):
    one, other = (
        f"{HF} --per_device_train_batch_size 4 --gradient_accumulation_steps 8",
        f"{HF} --per_device_train_batch_size 2",
    )
    for script in (f"{one}\n{other}\n", f"{one} && {other}\n", f"bash -c '{one}; {other}'\n"):
        ran = checked(cli, tmp_path, script)
        assert ran.code == 2 and "has 2 commands with different flags" in ran.err and "Paste one of them" in ran.err, (
            ran
        )
    assert "(lines 1, 2)" in checked(cli, tmp_path, f"{one}\n{other}\n").err
    assert checked(cli, tmp_path, f"{one}\n{one} --seed 2\n").code == 0
    ran = cli("check", "bash", "-c", f"{one}; {other}")
    assert ran.code == 2 and "has 2 commands with different flags" in ran.err


def test_a_configuration_whose_name_only_the_shell_knows_has_no_defaults(cli, tmp_path):
    """The shape of torchtitan's run_train.sh."""
    start = 'NGPU=${NGPU:-"8"}\nCONFIG_FILE=${CONFIG_FILE:-"./debug_model.toml"}\ntorchrun --nproc_per_node=${NGPU} '
    ran = checked(cli, tmp_path, f'{start} -m torchtitan.train --job.config_file ${{CONFIG_FILE}} "$@"\n')
    assert ran.code == 2 and "job.config_file=${CONFIG_FILE} is known only when the job runs" in ran.err


def test_a_configuration_that_a_script_names_is_read(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lf.yaml").write_text("stage: sft\ntemplate: llama3\nper_device_train_batch_size: 4\n")
    (tmp_path / "acc.yaml").write_text("num_processes: 8\nnum_machines: 1\nmixed_precision: bf16\n")
    ran = checked(cli, tmp_path, "C=lf.yaml\nllamafactory-cli train $C\n")
    assert ran.code == 0 and "4 micro × 1 accumulation" in ran.out, ran
    line = "accelerate launch --config_file acc.yaml train.py --output_dir o --per_device_train_batch_size 4"
    ran = checked(cli, tmp_path, line)
    assert ran.code == 0 and "32 = 4 micro × 1 accumulation × 8" in ran.out, ran
    ran = checked(cli, tmp_path, line.replace("acc.yaml", "acc.yaml --num_processes 4"))
    assert "16 = 4 micro × 1 accumulation × 4" in ran.out, ran


def test_a_command_in_the_text_of_a_shell_is_pasted(cli):
    text = f"cd /x; python pretrain_gpt.py {MORE}"
    for line in (
        ["srun", "-N", "4", "--ntasks-per-node", "8", "bash", "-c", text],
        ["sh", "-c", text, "--devices", "32"],
    ):
        ran = cli("check", *line)
        assert ran.code == 0 and "64 = 2 micro × 1 accumulation × 32" in ran.out, ran


def test_an_open_quote_is_said_with_its_line(tmp_path):
    for text, said in (
        (f"\n{RUN} --name 'x\n", "' in line 2 is not closed"),
        ("A=1\nB=(--x 1\n", "( in line 2 is not closed"),
    ):
        (tmp_path / "run.sh").write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_keys(str(tmp_path / "run.sh"))
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("a b;c|d&&e", [["a", "b"], ["c"], ["d"], ["e"]]),
        ("a 'b c' \"d $(e \"f g\") h\" `i j`", [["a", "b c", 'd $(e "f g") h', "`i j`"]]),
        ("a ${b:-c d} $((1 + 2)) x$(y ')')z", [["a", "${b:-c d}", "$((1 + 2))", "x$(y ')')z"]]),
        ("a >b 2>&1 <c <<<d e &>f g", [["a", "e", "g"]]),
        ("a <<X <<-'Y' b\n1\nX\n\t2 'z\n\tY\nc", [["a", "b"], ["c"]]),
        ("((i = 1; i < 3))\na # b\nc\\\nd", [["a"], ["cd"]]),
        ("case $1 in\n a) b ;;\n *) c ;;\nesac", [["case", "$1", "in"], ["a"], ["b"], ["*"], ["c"], ["esac"]]),
    ],
)  # fmt: skip
def test_the_words_of_commands(text, made):
    assert [one.words for one in commands(text)] == made


PIECES = [
    *("a", "--lr", "1", "=", ",", "[x]", "{y}", "j.k", "/", " ", "  ", "\t"),
    *("#", "# b", "\\#", "'#'", '"d#e"', '"b c"', "'f g'", "\\ ", "\\\n", "\\'", "''", '""'),
    *('"h\\"i"', '"\\\\"', '"it\'s"', "'\"'"),
]


@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
def test_the_words_are_those_of_bash(text):
    done = subprocess.run(["bash", "--norc", "-fc", f"printf '%s\\0' _ {text}\n"], capture_output=True, text=True)
    assume(done.returncode == 0 and not done.stderr)  # else a quote is open
    assert commands(f"_ {text}")[0].words == done.stdout.split("\0")[:-1]


def test_the_words_of_a_text_with_an_open_quote():
    assert words("it's --lr 1") == ["it's", "--lr", "1"]


@pytest.mark.parametrize(
    "text",
    [
        "A=1 " * 60_000,
        "A='x y' " * 30_000,
        f"{RUN} --lr 1\n" * 5000,
        "".join(f"python t{n}.py --lr {n}\n" for n in range(9000)),
        "".join(f"python --micro-batch-size {n}\n" for n in range(7000)),
        "".join(f"A{n}='--x {n}'\n" for n in range(12_000)) + RUN,
        "a <<X\n" * 30_000,
        "$(" * 100_000 + "--x",
        "a" + "${a" * 80_000,
        "(" * 200_000 + " --x",
        '"$A" ' * 50_000 + "--x",
        "bash -c 'bash -c x' " * 12_000 + "--x",
        "\\\n" * 120_000 + "--x",
        "9" * 250_000 + " --x",
    ],
    ids=range(14),
)  # fmt: skip
def test_a_large_script_is_read_quickly(text):
    read_script("first.sh", f"{RUN} {BATCH}")  # imports
    start = time.process_time()
    try:
        read_script("large.sh", text)
    except ConfigError as error:
        assert len(str(error)) < 400
    assert time.process_time() - start < 2  # half a second where nothing else runs


MINE = f"torchrun --nproc_per_node 8 pretrain_mine.py {MORE} --tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    "script",
    [
        f"# Same data as the axolotl run of May\n{MINE}\n",
        f"pip install axolotl\n{MINE}\n",
        f"conda activate axolotl && {MINE}\n",
        f"{MINE} --wandb-project axolotl\n",
        f"{MINE} --wandb-project axolotl --bf16\n",
        f"{MINE} --tags llama axolotl\n",
    ],
)
def test_a_word_that_is_no_program_does_not_say_the_framework(cli, tmp_path, script):
    (tmp_path / "run.sh").write_text(script)
    line = script.splitlines()[-1].rpartition("&& ")[2]
    for typed in ([str(tmp_path / "run.sh")], line.split()):
        ran = cli("check", *typed)
        assert ran.out.startswith("ok: Megatron-LM") and "64 = 2 micro × 8 accumulation × 4" in ran.out, ran
        assert cli("plan", *typed, "--json").json["global_batch_size"] == 64


def test_a_comment_does_not_say_the_framework(cli, tmp_path):
    ran = checked(cli, tmp_path, f"# pip install trl\n{HF} --per_device_train_batch_size 2\n")
    assert ran.out.startswith("ok: Hugging Face")
