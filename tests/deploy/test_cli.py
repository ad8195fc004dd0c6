"""The command line: exit statuses, one line for each error, no heavy imports in small commands."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from deploy import cli, serve
from deploy.environment import HostEnvironment
from proto.messages.lifecycle import NewFrontEnd
from proto.runtime import process
from proto.runtime.run_directory import TORCH_FOLDER_VARIABLE
from proto.settings.config import ServeConfig


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("tokend 0.")


def test_fault_injection_needs_its_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEND_FAULTS", "worker:kill@20")
    assert cli.main(["serve"]) == 2
    assert "--enable-fault-injection" in capsys.readouterr().err
    monkeypatch.setenv("TOKEND_FAULTS", "worker:kill")
    assert cli.main(["serve", "--enable-fault-injection"]) == 2
    assert "'worker:kill' is not a fault such as" in capsys.readouterr().err


def test_models_are_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["models", "--supported"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert cli.main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["smollm2-135m-instruct", "gemma3-270m"]
    assert all("not downloaded" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["serve", "--prt", "1"], "unknown flag --prt; did you mean --port?"),
        (
            ["serve", "--device", "cpu", "--kv-cache-dtype", "fp8"],
            "--kv-cache-dtype fp8 needs --device cuda",
        ),
        (["serve", "--tokenizer", "Qwen/Qwen3"], "--tokenizer Qwen/Qwen3: no such folder"),
        (["serve", "--tokenizer", "/"], "--tokenizer /: the folder has no tokenizer.json"),
        (
            ["serve", "--port", "0", "qwen3:0.6b"],
            "or folder, names of Ollama are not known, and the",
        ),
        (["pull", "llama3.2"], "names of Ollama are not known, and the packaged models are"),
        (["pull", "smollm"], "; did you mean smollm2-135m-instruct?"),
        (
            ["serve", "--chat-template", "/nowhere"],
            "--chat-template /nowhere: no such file",
        ),
        (["serve", "--sched-trace", "/dev/null"], "--sched-trace /dev/null: is not a regular file"),
        (
            ["serve", "--enable-lora", "--lora-modules", "pirate=/nowhere"],
            "--lora-modules: pirate: /nowhere: there is no such file or folder",
        ),
        (
            ["serve", "--port", "0", "./nosuch.gguf"],
            f"no model './nosuch.gguf': there is no file {os.path.abspath('nosuch.gguf')}",
        ),
        (["serve", "--port", "0", "models/x.gguf"], "there is no file "),
        (["plan", "/abs/nosuch"], "no model '/abs/nosuch': there is no file or folder /abs/nosuch"),
        (
            ["serve", "--device", "cpu", "--kv-cache-memory", "1000T"],
            "--kv-cache-memory 1,024,000.00 GiB is more than the ",
        ),
        (["pull"], "tokend pull takes one name"),
        (["pull", "gpt-5"], "no model 'gpt-5': the packaged models are smollm2-135m-instruct"),
        (["pull", "smollm2-135m-instruct", "--revision", "v1"], "is for names on the Hugging Face"),
        (["pull", "a/b", "--revison", "v1"], "unknown option --revison; did you mean --revision?"),
        (["pull", "a/b", "--revision"], "--revision needs a value"),
        (["rm"], "tokend rm takes one name"),
        (["rm", "gemma3-27m"], "no model gemma3-27m here; tokend list lists them"),
        (["stop", "--now"], "tokend stop takes one MODEL, PORT or PID, or --all"),
        (["chat", "a", "b"], "unexpected b: tokend chat takes one MODEL or URL"),
        (["chat", "--temperature", "0"], "unknown option --temperature"),
        (["chat", "--max-tokens", "0"], "--max-tokens takes a whole number from 1, not 0"),
        (["prepare", "a", "b"], "tokend prepare takes one model"),
        (["version", "please"], "tokend version takes no arguments"),
    ],
)
def test_usage_errors_are_one_line_and_status_2(
    words: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HOME", raising=False)
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tokend: ")
    assert expected in line


@pytest.mark.parametrize(
    ("command", "suggestion"),
    [
        ("srve", "serve"),
        ("run", "chat"),
        ("show", "plan"),
        ("fetch", "pull"),
        ("lst", "list"),
        ("org/name", "tokend serve org/name"),
        ("smollm2-135m-instruct", "tokend serve smollm2-135m-instruct"),
    ],
)
def test_an_unknown_command_names_a_near_one(
    command: str, suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tokend: unknown command {command}; did you mean {suggestion}?")


def test_an_unknown_command_says_where_all_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["xyzzy"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "tokend: unknown command xyzzy; tokend --help lists the commands"


def test_a_share_of_gpu_memory_has_a_notice_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu-memory-utilization", "0.9", "--device", "cpu", "--chat-template", "/nowhere"]
    assert cli.main(["serve", *words]) == 2
    notice, _ = capsys.readouterr().err.splitlines()
    assert notice.startswith("tokend: --gpu-memory-utilization has no effect on a CPU")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_before_the_supervisor_runs(
    number: int,
    status: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prepare(*arguments: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(10)

    monkeypatch.setattr("deploy.serve._prepare_models", prepare)
    assert cli.main(["serve", "--port", "0"]) == status
    assert capsys.readouterr().err == "tokend: stopped before it was ready\n"


@pytest.mark.parametrize("command", ["serve", "plan"])
def test_workers_of_engines_that_have_no_core_are_refused_before_the_model_is_read(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.serve.usable_cores", lambda: 4)
    monkeypatch.setattr("deploy.serve._prepare_models", _read_model)
    words = [command, "--port", "0", "--device", "cpu", "-dp", "3", "-tp", "2"]
    assert cli.main(words) == 2
    assert capsys.readouterr().err == (
        "tokend: --data-parallel-size 3 with --tensor-parallel-size 2 needs 6 cores, and there are "
        "4: --cpu-threads 1 lets workers share cores\n"
    )
    for enough in (["--cpu-threads", "1"], ["-dp", "2"]):
        with pytest.raises(ZeroDivisionError):
            cli.main([*words, *enough])


def test_pools_of_all_engines_count(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.serve.usable_cores", lambda: 4)
    monkeypatch.setattr("deploy.serve.total_memory", lambda: 10 << 30)
    words = ["serve", "--device", "cpu", "-dp", "3", "--kv-cache-memory", "4G"]
    assert cli.main(words) == 2
    message = (
        "--kv-cache-memory 4.00 GiB for each of 3 engines is more than the 10.00 GiB of memory"
    )
    assert message in capsys.readouterr().err


def _read_model(*arguments: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "words",
    [
        ["--prt", "1", "--log-format", "json"],
        ["--log-format=json", "--max-num-seqs", "0"],
        ["--log_format", "json", "--max-num-seqs", "0"],
        ["no-such-model", "--port", "0", "--log-format", "json"],
        ["--config", "FILE", "--max-num-seqs", "0"],
    ],
)
def test_errors_are_json_with_log_format_json(
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "tokend.yaml").write_text("log-format: json\n")
    words = [word.replace("FILE", str(tmp_path / "tokend.yaml")) for word in words]
    assert cli.main(["serve", *words]) == 2
    printed = capsys.readouterr()
    *_, last = map(json.loads, printed.err.splitlines())
    assert (last["level"], last["process"], printed.out) == ("ERROR", "tokend", "")


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "no-such-model", "--api-key", "hush"],
        ["plan", "no-such-model", "--api_key=hush"],
        ["pull", "no-such-model", "--hf-token", "hush"],
    ],
)
def test_commands_hide_secrets_from_process_listings(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(process, "set_title", titles.append)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(words) != 0
    (title,) = titles
    assert title.startswith(f"tokend {words[0]} no-such-model")
    assert "hush" not in title


@pytest.mark.parametrize(
    "command",
    [
        *sorted(cli._COMMANDS),
        "trace view",
        *(f"bench {name}" for name in cli._BENCHES),
    ],
)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_has_help(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main([*command.split(), flag])
    except SystemExit as exit:  # raised by argparse
        status = exit.code
    assert status == 0
    assert f"usage: tokend {command}" in capsys.readouterr().out


def test_programs_of_a_worker_leave_nothing_of_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = f"import os\nprint(os.listdir(os.environ[{TORCH_FOLDER_VARIABLE!r}]))\n"
    (tmp_path / "program.py").write_text(program)
    variables = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = HostEnvironment.of({**os.environ, **variables})
    done = serve.run_worker_program("program", NewFrontEnd(0, 1), ServeConfig(), environment)
    assert done.stdout == b"[]\n"
    assert [each.name for each in tmp_path.iterdir()] == ["program.py"]


def test_an_open_server_and_a_misspelt_key_are_warned_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEND_APIKEY", "secret")
    words = ["serve", "no-such-model", "--port", "0"]
    assert cli.main([*words, "--host", "0.0.0.0"]) == 2
    written = capsys.readouterr().err
    assert "TOKEND_APIKEY has no effect: did you mean TOKEND_API_KEY?" in written
    assert "--host 0.0.0.0 without --api-key" in written
    assert "secret" not in written
    monkeypatch.delenv("TOKEND_APIKEY")
    for more in ([], ["--host", "0.0.0.0", "--api-key", "secret"]):
        assert cli.main([*words, *more]) == 2
        assert "WARNING" not in capsys.readouterr().err


def test_an_unknown_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["serve", "nonsense", "--port", "0"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "no model 'nonsense'" in line
    assert "smollm2-135m-instruct" in line


def test_a_folder_for_kv_that_cannot_be_made_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    extra = {"spec_name": "DiskOffloadingSpec", "disk_path": "/proc/kv", "disk_bytes_to_use": 1}
    transfer = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    words = ["--kv-transfer-config", json.dumps(transfer)]
    assert cli.main(["serve", "no-such-model", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "kv_connector_extra_config.disk_path /proc/kv: No such file" in line


def test_a_port_in_use_is_reported_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "no-such-model", "--port", port]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--port {port} is in use on 127.0.0.1" in line


def test_a_host_of_another_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--host", "192.0.2.1", "--port", "0"]) == 2
    assert "cannot listen on 192.0.2.1" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["version"], ["models"], ["serve", "--help"], ["rm", "-h"]])
def test_small_commands_import_nothing_heavy(words: list[str]) -> None:
    heavy = {"torch", "transformers", "gguf", "numpy", "huggingface_hub", "rich", "yaml", "zmq"}
    script = (
        "import sys; from deploy import cli; "
        f"status = cli.main({words!r}); "
        f"print('HEAVY', sorted(set(sys.modules) & {heavy!r})); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_a_closed_stdout_is_not_an_error() -> None:
    """For example `tokend serve --help | head -1`."""
    script = "import sys; from deploy import cli; sys.exit(cli.main(['serve', '--help']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_ctrl_c_while_modules_are_imported() -> None:
    script = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "deploy.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from deploy.start import main
sys.argv = ["tokend", "version"]
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
