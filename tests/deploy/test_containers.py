"""Container images, compose file, dashboards and Kubernetes manifest match the daemon."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from api_server.http.access import HEALTH
from api_server.metrics.metric_sheet import MetricSheet
from api_server.metrics.metrics import Metrics
from api_server.routes import completions
from deploy.environment import API_KEY_VARIABLE, HostEnvironment
from deploy.supervisor.shutdown import ON_REQUEST
from proto.settings.config import FrontEndConfig, MediaConfig, ReliabilityConfig
from worker.cuda.build_flashinfer import PACKAGE, parser
from worker.cuda.flashinfer_library import HEAD_DIMS

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("Dockerfile.*"))
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
PORT = FrontEndConfig().port
ALERTS = ROOT / "deploy" / "docker" / "alerts.yml"
PACKAGES = ("api_server", "deploy", "engine_core", "proto", "worker")
LONGEST_END = ReliabilityConfig().shutdown_timeout + ON_REQUEST.until_kill
"""Longest time in seconds from SIGTERM until the last process ends."""


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix)
class TestDockerfile:
    def test_the_supervisor_is_process_1_without_root(self, path: Path) -> None:
        final = path.read_text().rsplit("\nFROM ", 1)[1]
        assert 'ENTRYPOINT ["tokend"]' in final
        assert "\nUSER 10001:0\n" in final
        assert "tini" not in path.read_text()

    def test_any_user_of_group_0_can_write_to_the_cache(self, path: Path) -> None:
        """Also what libraries keep in the home folder, which such a user does not have."""
        final = path.read_text().rsplit("\nFROM ", 1)[1]
        cache = re.search(r"install -d -o 10001 -g 0 -m (\d+) (\S+)", final)
        assert cache is not None
        assert int(cache[1], 8) & 0o070 == 0o070
        variables = dict(re.findall(r"\b(HOME|HF_HOME|XDG_CACHE_HOME)=(\S+)", final))
        assert HostEnvironment.of(variables).cache == variables["HOME"] == cache[2]
        hub = HostEnvironment.of(variables).hugging_face_cache
        assert hub.startswith(cache[2] + "/"), "downloads go to the volume, too"
        assert f"\nVOLUME {cache[2]}\n" in final

    def test_kernels_are_compiled_before_the_sources_that_change(self, path: Path) -> None:
        """What a step needs stands before it, so that a layer is kept while that is the same."""
        build = path.read_text().rsplit("\nFROM ", 1)[0]
        early = build.partition("\nCOPY . ./\n")[0]
        copied = re.findall(r"^COPY (.*) \S+$", early, re.M)
        files = {name for words in copied for name in words.split()}
        assert "\nRUN /opt/tokend/bin/python worker/cpu/build_kernels.py" in early
        assert {"worker/cpu/build_kernels.py", "worker/csrc"} <= files
        if "build_flashinfer" in build:
            assert "-m worker.cuda.build_flashinfer" in early
            script = "import sys, worker.cuda.build_flashinfer; print(*sys.modules)"
            found = subprocess.check_output([sys.executable, "-c", script], text=True, cwd=ROOT)
            own = {name for name in found.split() if name.partition(".")[0] in PACKAGES}
            paths = [name.replace(".", "/") for name in own]
            needed = {
                f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py" for path in paths
            }
            assert needed <= files

    def test_the_health_check_uses_a_path_without_key(self, path: Path) -> None:
        found = re.search(r"urlopen\('http://127.0.0.1:(\d+)(/[\w/]+)'", path.read_text())
        assert found is not None
        assert int(found[1]) == PORT
        assert found[2] == "/health/ready"
        assert found[2] in HEALTH.paths


def test_the_gpu_image_has_prebuilt_kernels_and_a_compiler() -> None:
    """FlashInfer's kernels are prebuilt for every head size; Triton compiles later."""
    stages = (ROOT / "deploy/docker/Dockerfile.cuda").read_text().split("\nFROM ")
    build, final = stages[-2:]
    installed = set(re.search(r"apt-get install (.*)", final)[1].split())  # type: ignore[index]
    assert {"gcc", "libc6-dev", "python3-dev"} <= installed
    kernels = re.search(r'ARG KERNELS="(.*)"', build)
    run = re.search(r"-m worker.cuda.build_flashinfer (.*?) \\\n", build)
    assert kernels is not None
    assert run is not None
    words = run[1].replace("${KERNELS}", kernels[1]).replace("$(nproc)", "4")
    options = parser().parse_args(words.split())
    assert tuple(options.head_dims) == HEAD_DIMS
    assert options.windows
    assert options.rows
    assert f"mv {options.folder}/{PACKAGE} /opt/tokend/lib/python3*/site-packages" in build


def test_the_build_context_contains_only_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    needed = {name.removesuffix("*") for name in packages}
    needed |= {project["project"]["readme"], *project["project"]["license-files"]}
    needed |= {"pyproject.toml", "setup.py", "constraints.txt", "constraints-gpu.txt"}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == needed


def shown() -> str:
    """Return the text of /metrics."""
    metrics = Metrics("model", MetricSheet.of_one())
    http = metrics.register_http_metrics(completions.router.routes)
    http.record_response({"path": "/v1/completions", "method": "POST"}, 200, 0.1)
    return metrics.render().decode()


def exposed() -> set[str]:
    """Return the names of all samples in /metrics."""
    return set(re.findall(r"^([a-z0-9_:]+)[{ ]", shown(), re.MULTILINE))


def labels(name: str) -> set[str]:
    """Return the labels of a sample."""
    found = re.search(rf"^{name}{{(.*)}} ", shown(), re.MULTILINE)
    return set(re.findall(r'(\w+)="', found[1])) if found is not None else set()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_the_dashboard_shows_metrics_that_exist(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [
        each["definition"] for each in dashboard["templating"]["list"] if "definition" in each
    ]
    names = {
        name for expr in expressions for name in re.findall(r"\b(?:\w+:|process_|http_)\w+", expr)
    }
    assert len(names) >= 20
    assert names <= exposed()
    own = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exposed() if "tokend:" in name}
    assert own <= {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    for expr in expressions:
        name, by = re.search(r"\w*:\w+|http_\w+", expr), re.search(r"by \((\w+)\)", expr)
        assert by is None or (name is not None and by[1] in labels(name[0]))
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_alerts_are_about_metrics_that_exist() -> None:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    assert len(group["rules"]) >= 6
    for rule in group["rules"]:
        found = re.findall(r"\b(?:\w+:|http_)\w+", rule["expr"])
        assert found or rule["expr"].startswith("up{"), rule
        for name in found:
            assert name in exposed(), name
        by = re.search(r"by \(([\w, ]+)\)", rule["expr"])
        if by:
            assert {*by[1].split(", ")} <= labels(found[0]) | {"instance"}
    loaded = yaml.safe_load((ROOT / "deploy/docker/prometheus.yml").read_text())["rule_files"]
    assert loaded == [ALERTS.name]


def test_compose_mounts_existing_files_and_outlasts_the_shutdown() -> None:
    services: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert (ROOT / services["tokend"]["build"]["dockerfile"]).is_file()
    assert services["tokend"]["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    assert int(services["tokend"]["stop_grace_period"].removesuffix("s")) > LONGEST_END
    mounted = [
        volume.split(":")[0]
        for service in services.values()
        for volume in service.get("volumes", ())
        if volume.startswith(".")
    ]
    assert len(mounted) == 4
    assert all((ROOT / path).exists() for path in mounted)
    scraped = yaml.safe_load((ROOT / "deploy" / "docker" / "prometheus.yml").read_text())
    (job,) = scraped["scrape_configs"]
    (config,) = services["prometheus"]["configs"]
    assert job["authorization"] == {"credentials_file": config["target"]}
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    assert compose["configs"][config["source"]] == {"content": f"${{{API_KEY_VARIABLE}:-none}}"}
    assert job["static_configs"][0]["targets"] == [f"tokend:{PORT}"]


def test_shared_memory_has_space_for_the_pixels_of_images() -> None:
    """The pixels take half of it at most."""
    services: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert (
        int(services["tokend"]["shm_size"].removesuffix("m")) << 20
        >= 2 * MediaConfig().media_memory
    )
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes/tokend.yaml").read_text())
    deployment = next(each for each in documents if each["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (name,) = {
        mount["name"]
        for mount in pod["containers"][0]["volumeMounts"]
        if mount["mountPath"] == "/dev/shm"
    }
    volume = next(each["emptyDir"] for each in pod["volumes"] if each["name"] == name)
    assert volume["medium"] == "Memory"
    assert int(volume["sizeLimit"].removesuffix("Mi")) << 20 >= 2 * MediaConfig().media_memory


def test_compose_limits_restarts() -> None:
    """Compose cannot tell a configuration error from a crash, so it limits restarts."""
    services: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert re.fullmatch(r"on-failure:[1-9]", services["tokend"]["restart"])


def test_the_deployment_probes_paths_without_key_and_outlasts_the_shutdown() -> None:
    documents = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/tokend.yaml").read_text()))
    deployment = next(each for each in documents if each["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": PORT}]
    probes = {"startupProbe": "ready", "readinessProbe": "ready", "livenessProbe": "live"}
    for probe, kind in probes.items():
        path = container[probe]["httpGet"]["path"]
        assert path == f"/health/{kind}"
        assert path in HEALTH.paths
    limits = (
        container["livenessProbe"]["periodSeconds"] * container["livenessProbe"]["failureThreshold"]
    )
    assert limits > 1.5 * ReliabilityConfig().step_timeout, (
        "the daemon has time to recover by itself"
    )
    (key,) = container["env"]
    assert "optional" not in key["valueFrom"]["secretKeyRef"], "the port would be open to all pods"
    _, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + LONGEST_END
    uids = {re.search(r"--uid (\d+)", path.read_text())[1] for path in DOCKERFILES}  # type: ignore[index]
    assert uids == {str(pod["securityContext"]["runAsUser"])}
    assert pod["securityContext"]["runAsGroup"] == 0
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    service = next(each for each in documents if each["kind"] == "Service")
    assert service["spec"]["selector"].items() <= labels.items()
