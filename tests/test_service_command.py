"""``adaptive service``: the files written for systemd and launchd, and the commands run."""

from __future__ import annotations

import json
import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import Command
from filelock import FileLock

from adaptive.errors import AdaptiveError
from adaptive.service import notices
from adaptive.service.server import only_server
from adaptive.state import open_state
from cli import service
from cli.managers import Launchd, Systemd, unit_of

ROOT = Path(__file__).resolve().parent.parent
VERIFY = shutil.which("systemd-analyze")


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A Linux user with a fake systemctl; returns a function that lists the arguments it was called with. It fails
    while the file "told.fail" exists, and prints what the file "told.state" has."""
    tools, told = tmp_path / "bin", tmp_path / "told"
    tools.mkdir()
    script = f'#!/bin/sh\necho "$*" >> {told}\n[ -e {told}.fail ] && echo "no bus" >&2 && exit 1\ncat {told}.state\n'
    (tmp_path / "told.state").write_text("active\n")
    monkeypatch.setattr(service, "LOOKED_AFTER_S", 0.0)
    (tools / "systemctl").write_text(script)
    (tools / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("ADAPTIVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.platform", "linux")
    return lambda: told.read_text().splitlines() if told.exists() else []


def unit(tmp_path: Path) -> Path:
    return tmp_path / "config" / "systemd" / "user" / "adaptive.service"


def test_it_is_written_started_shown_and_removed(
    manager: Callable[[], list[str]], adaptive: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my target").mkdir()
    (tmp_path / "key").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADAPTIVE_DEBUG", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "models"))
    options = ("--target", "my target", "--port=8081", "--cache-mb", "5", "--draft-key-file", "key")
    status, out, err = adaptive("service", "install", "--", *options)
    assert status == 0, err
    command = next(line for line in unit(tmp_path).read_text().splitlines() if line.startswith("ExecStart="))
    assert command.endswith(
        f' serve --target "{tmp_path}/my target" --port=8081 --cache-mb 5 --draft-key-file {tmp_path}/key'
    )
    program = command.removeprefix("ExecStart=").split(" serve ")[0]
    assert subprocess.run([*shlex.split(program), "--version"], capture_output=True, check=True).stdout
    told = [line.removeprefix("--user ") for line in manager()]
    starting = ["daemon-reload", "enable adaptive", "reset-failed adaptive", "restart adaptive", "is-active adaptive"]
    assert told == starting
    assert {"OOMPolicy=continue", "KillMode=mixed"} <= set(unit(tmp_path).read_text().splitlines())
    assert re.search("ADAPTIVE_HOME.* into adaptive.toml\n", err)  # a service does not inherit it
    assert re.search("HF_HOME, .*XDG_CONFIG_HOME.* into ~/.config/environment.d/adaptive.conf", err)
    assert "ADAPTIVE_DEBUG" not in err  # which no file can set
    monkeypatch.delenv("ADAPTIVE_DEBUG")

    assert adaptive("service", "status")[:2] == (0, f"{unit(tmp_path)}: active\n")
    assert adaptive("service", "remove")[0] == 0
    assert not unit(tmp_path).exists()
    assert manager()[-2:] == ["--user disable --now adaptive", "--user daemon-reload"]
    status, out, _ = adaptive("service", "status", "--json")
    assert (status, json.loads(out)["installed"]) == (1, False)
    assert adaptive("service", "remove")[0] == 2


def test_without_start_nothing_is_told_and_what_to_type_is_said(
    manager: Callable[[], list[str]], adaptive: Command, tmp_path: Path
) -> None:
    status, out, _ = adaptive("service", "install", "--no-start")
    assert (status, manager()) == (0, [])
    assert "systemctl --user enable --now adaptive" in out
    assert unit(tmp_path).is_file()


@pytest.mark.parametrize("options", [["--state-dir", "./new state"], ["--state-dir=./new state"]])
def test_a_state_folder_that_is_not_there_yet_is_the_one_meant(
    manager: Callable[[], list[str]], adaptive: Command, tmp_path: Path, options: list[str]
) -> None:
    status, _, err = adaptive("service", "install", "--no-start", "--", *options)
    assert status == 0, err
    assert f"{tmp_path}/new state" in unit(tmp_path).read_text()
    assert not (tmp_path / "new state").exists()
    status, _, err = adaptive("service", "install", "--no-start", "--", "--state-dir", "~nosuchuser/x")
    assert (status, "home folder" in err) == (2, True)


def test_a_settings_file_of_the_current_folder_is_said_to_be_left_behind(
    manager: Callable[[], list[str]], adaptive: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adaptive.toml").write_text("port = 8081\n")
    status, _, err = adaptive("service", "install", "--no-start")
    assert (status, f"not handed on: {tmp_path}/adaptive.toml" in err) == (0, True)
    for options in (["--config", "adaptive.toml"], ["--config=adaptive.toml"]):
        assert "not handed on: /" not in adaptive("service", "install", "--no-start", "--", *options)[2]
        assert f"{tmp_path}/adaptive.toml" in unit(tmp_path).read_text()
    monkeypatch.setenv("HOME", str(tmp_path))  # where the service runs
    assert "not handed on: /" not in adaptive("service", "install", "--no-start")[2]


def test_a_service_that_ends_at_once_is_not_said_to_run(
    manager: Callable[[], list[str]], adaptive: Command, tmp_path: Path
) -> None:
    (tmp_path / "told.state").write_text("failed\n")
    status, _, err = adaptive("service", "install")
    assert status == 1
    assert "it does not run (failed); its log: journalctl" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prot", "8081"], "No such option"),
        (["--port", "many"], "many"),
        (["--distill", "sometimes"], "distill is 'sometimes'"),
        (["--port", "99999"], "setting port"),
        (["--config", "nowhere.toml"], "does not exist"),
        (["--config", "."], "is not a file"),
        (["--api-key", "secret"], "--api-key-file FILE"),
        (["--api-key=secret"], "--api-key-file FILE"),
    ],
)
def test_what_serve_would_refuse_is_refused_before_anything_is_written(
    manager: Callable[[], list[str]], adaptive: Command, tmp_path: Path, options: list[str], said: str
) -> None:
    status, _, err = adaptive("service", "install", "--", *options)
    assert status == 2
    assert said.lower() in err.lower()
    assert len(err.strip().splitlines()) == 1
    assert not unit(tmp_path).exists()


def test_the_help_of_serve_may_be_asked_for(
    manager: Callable[[], list[str]], adaptive: Command, tmp_path: Path
) -> None:
    status, out, err = adaptive("service", "install", "--", "--help")
    assert (status, err) == (0, "")
    assert "--keep-caches" in out
    assert not unit(tmp_path).exists()


def test_a_systemd_that_cannot_be_reached_is_one_line(
    manager: Callable[[], list[str]], adaptive: Command, tmp_path: Path
) -> None:
    (tmp_path / "told.fail").touch()
    status, _, err = adaptive("service", "install")
    assert status == 2
    assert "`systemctl --user daemon-reload` failed: no bus" in err
    status, out, err = adaptive("service", "remove")
    assert (status, out, unit(tmp_path).is_file()) == (2, "", True)
    assert "`systemctl --user disable --now adaptive` failed: no bus; " in err


def test_a_system_without_either_is_told_so(
    manager: Callable[[], list[str]], adaptive: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "freebsd14")
    status, _, err = adaptive("service", "install")
    assert (status, "not for freebsd14" in err) == (2, True)


def test_servers_are_found_by_what_they_hold_and_not_by_what_a_killed_one_left(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "adapters").mkdir(parents=True)
        notices.write(tmp_path / name, f"http://127.0.0.1/{name}")
    with FileLock(tmp_path / "two" / "server.lock"):
        found = notices.servers(tmp_path)
    assert [(one.pair, one.url, one.pid) for one in found] == [("two", "http://127.0.0.1/two", os.getpid())]


@pytest.mark.skipif(VERIFY is None, reason="systemd-analyze is not here")
def test_systemd_takes_the_unit_with_any_path_in_it(tmp_path: Path) -> None:
    program = tmp_path / "a b%c$d" / "adaptive"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    file = tmp_path / "adaptive.service"
    command = [str(program), "serve", "--name", "a % b $HOME ; 'c' \\ #", ""]
    file.write_text(unit_of(command))

    def verify() -> tuple[int, str]:
        assert VERIFY is not None
        command = [VERIFY, "--user", "--man=no", "verify", str(file)]
        runtime = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        done = subprocess.run(command, env=runtime, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    code, said = verify()
    if "Failed to initialize manager" in said:
        pytest.skip("systemd-analyze finds no systemd here")
    assert (code, said) == (0, "")
    with pytest.raises(AdaptiveError, match="cannot be started by systemd"):
        unit_of([str(tmp_path / 'adaptive"e')])
    # It does complain about a real problem.
    file.write_text(unit_of([str(tmp_path / "nothing")]))
    assert verify()[0] != 0


def test_launchd_is_given_the_command_word_by_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    agent = Launchd()
    agent.write(["/opt/a b/adaptive", "serve", "--name", "<x> & $HOME"])
    assert agent.file == tmp_path / "Library" / "LaunchAgents" / "local.adaptive.plist"
    written = plistlib.loads(agent.file.read_bytes())
    assert written["ProgramArguments"] == ["/opt/a b/adaptive", "serve", "--name", "<x> & $HOME"]
    assert written["KeepAlive"] == {"SuccessfulExit": False}
    assert written["ProcessType"] == "Interactive"
    assert agent.state() == "unknown" or sys.platform == "darwin"  # launchctl does not exist here
    assert Systemd().file.name == "adaptive.service"


def test_an_agent_that_launchd_does_not_stop_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, state = tmp_path / "launchctl", tmp_path / "state"
    tool.write_text(f'#!/bin/sh\n[ "$1" = print ] && cat {state} && exit\necho "not permitted" >&2\nexit 1\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    state.write_text("\tstate = running\n")
    with pytest.raises(AdaptiveError, match=r"bootout.*not permitted"):
        Launchd().stop()
    state.write_text("")  # nothing is loaded
    Launchd().stop()


def test_an_agent_is_started_anew_once_launchd_has_forgotten_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``bootout`` returns while the process is still ending; ``bootstrap`` fails until it has ended."""
    ending, told = tmp_path / "ending", tmp_path / "told"
    (tmp_path / "launchctl").write_text(
        f"""#!/bin/sh
echo "$1" >> {told}
case $1 in
bootout) echo xxx > {ending}; echo "Boot-out failed: 36: Operation now in progress" >&2; exit 36 ;;
print) [ -s {ending} ] || exit 113; echo "	state = SIGTERMed"; x=$(cat {ending}); printf %s "${{x#x}}" > {ending} ;;
bootstrap) [ -s {ending} ] && echo "Bootstrap failed: 5: Input/output error" >&2 && exit 5 ;;
esac
exit 0
"""
    )
    (tmp_path / "launchctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    Launchd().start()
    words = told.read_text().split()
    assert (words[0], words[-1]) == ("bootout", "bootstrap")
    assert words.count("print") > 3


def test_the_dockerfile_copies_all_that_is_installed() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    copied = {word for words in copies for word in words}
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages | {"pyproject.toml", "setup.py", project["project"]["readme"]} <= copied
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert let_in == copied


def test_a_server_starts_while_its_lock_is_only_looked_at(tmp_path: Path) -> None:
    state = open_state(tmp_path, "pair")
    began = threading.Event()

    def start() -> str:
        began.set()
        with only_server(state):
            return "started"

    with ThreadPoolExecutor(1) as pool:
        with FileLock(state.root / "server.lock"):  # as ``service status`` does
            starting = pool.submit(start)
            assert began.wait(60)
            time.sleep(0.1)
        assert starting.result() == "started"
