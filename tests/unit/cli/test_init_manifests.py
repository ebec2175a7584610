"""The manifests against the schemas that Kubernetes, JobSet, Trainer and SkyPilot publish."""

import copy
import functools
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from outlast.cli.init import SLACK_S, SPOT_GRACE_S, Kubernetes, Sky, Training
from outlast.errors import ConfigError, Exit

SCHEMAS = Path(__file__).parent / "schemas"
KINDS = ("job", "jobset", "trainjob")
ARGUMENTS = ("--lr", "0.1", "--note", "a: b # c\n$(HOME)")


@functools.cache
def validator(name):
    """For a manifest's kind, or for a SkyPilot task."""
    if name == "sky":
        return jsonschema.Draft202012Validator(json.loads((SCHEMAS / "sky-task.json").read_text()))
    schema = json.loads((SCHEMAS / "manifests.json").read_text())
    inner = {"Job": "io.k8s.api.batch.v1.Job"}
    return jsonschema.Draft202012Validator(schema | {"$ref": f"#/$defs/{inner.get(name, name)}"})


def kubernetes(kind="job", *, nodes=1, fewest=None, cpus=0, **settings):
    training = Training(
        name="job", script="train.py", arguments=ARGUMENTS, nodes=nodes, fewest=fewest, cpus=cpus
    )
    recipe = Kubernetes(training=training, kind=kind, image="r/i:1", claim="data", **settings)
    return recipe, list(yaml.safe_load_all(recipe.render()))


def job_spec(documents):
    """The batch Job's spec, at whatever depth it is."""
    by_kind = {document["kind"]: document["spec"] for document in documents}
    if "Job" in by_kind:
        return by_kind["Job"]
    owner = by_kind.get("JobSet") or by_kind["TrainingRuntime"]["template"]["spec"]
    return owner["replicatedJobs"][0]["template"]["spec"]


def sky(spot=None, **settings):
    training = Training(name="job", script="train.py", arguments=ARGUMENTS, **settings)
    where = {"bucket": "s3://b"} if training.nodes == 1 else {"volume": "v"}
    where["accelerator"] = "" if training.cpus else "H100"
    return yaml.safe_load(Sky(training=training, spot=spot, **where).render())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("fewest", "nodes"), [(1, 1), (3, 3), (2, 3)])
@pytest.mark.parametrize("cpus", [0, 2])
@pytest.mark.parametrize("spot", ["", *SPOT_GRACE_S])
def test_manifests_fit_the_published_schemas(kind, fewest, nodes, cpus, spot):
    for document in kubernetes(kind, nodes=nodes, fewest=fewest, cpus=cpus, spot=spot)[1]:
        validator(document["kind"]).validate(document)


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("cpus", [0, 2])
def test_tasks_fit_the_published_schema(nodes, cpus):
    validator("sky").validate(sky(nodes=nodes, cpus=cpus))


def everywhere(document, path=()):
    """The path of each object within a document."""
    if isinstance(document, dict):
        yield path
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from everywhere(value, (*path, key))


FREE = {
    "labels",
    "annotations",
    "nodeSelector",
    "limits",
    "requests",
    "envs",
    "file_mounts",
    "volumes",
}


@pytest.mark.parametrize("kind", [*KINDS, "sky"])
def test_a_field_that_is_not_there_is_found_wherever_it_is(kind):
    """So a slip in a template fails the tests above, at any depth."""
    documents = [sky()] if kind == "sky" else kubernetes(kind, nodes=2, fewest=1, spot="gke")[1]
    tried = 0
    for document in documents:
        name = "sky" if kind == "sky" else document["kind"]
        for path in everywhere(document):
            if path and path[-1] in FREE:
                continue
            broken = copy.deepcopy(document)
            functools.reduce(lambda part, key: part[key], path, broken)["notThere"] = 1
            assert not validator(name).is_valid(broken), path
            tried += 1
    assert tried > 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 4])
def test_what_each_exit_code_means_to_a_job(kind, nodes):
    spec = job_spec(kubernetes(kind, nodes=nodes)[1])
    disrupted, again, never = spec["podFailurePolicy"]["rules"]
    assert disrupted["action"] == "Ignore"
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert (again["action"], again["onExitCodes"]["values"]) == ("Ignore", [Exit.DRAINED])
    assert never["action"] == "FailJob"
    assert never["onExitCodes"]["values"] == [Exit.USAGE, Exit.GAVE_UP, Exit.REFUSED]
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert spec["backoffLimit"] == 6 * nodes
    # Kubernetes takes no other value beside such a policy; it is written out for what it means.
    assert spec["podReplacementPolicy"] == "Failed"
    containers = [container["name"] for container in pod["containers"]]
    assert [again["onExitCodes"]["containerName"]] == containers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("settings", "requests", "limits"),
    [
        ({}, {"cpu": "2", "memory": "8Gi"}, {"nvidia.com/gpu": "1"}),
        ({"cpus": 3}, {"cpu": "3", "memory": "6Gi"}, None),
        (
            {"memory": "1Ti", "cpus_per_gpu": 8, "resources": ("rdma/ib=1", "hugepages-2Mi=5Gi")},
            {"cpu": "8", "memory": "1Ti"},
            {"nvidia.com/gpu": "1", "rdma/ib": "1", "hugepages-2Mi": "5Gi"},
        ),
    ],
)
def test_no_pod_asks_for_nothing(kind, settings, requests, limits):
    """One without requests for processors and memory is BestEffort: the first to be evicted."""
    (container,) = job_spec(kubernetes(kind, **settings)[1])["template"]["spec"]["containers"]
    found = container["resources"]
    assert (found["requests"], found.get("limits")) == (requests, limits)


@pytest.mark.parametrize("kind", KINDS)
def test_no_autoscaler_empties_the_machine(kind):
    assert job_spec(kubernetes(kind)[1])["template"]["metadata"]["annotations"] == {
        "karpenter.sh/do-not-disrupt": "true",
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    }


@pytest.mark.parametrize(
    ("spot", "label"),
    [
        ("", None),
        ("gke", {"cloud.google.com/gke-spot": "true"}),
        ("eks", {"eks.amazonaws.com/capacityType": "SPOT"}),
        ("karpenter", {"karpenter.sh/capacity-type": "spot"}),
        ("aks", {"kubernetes.azure.com/scalesetpriority": "spot"}),
    ],
)
def test_each_cloud_s_spot_machines_have_their_label(spot, label):
    assert job_spec(kubernetes(spot=spot)[1])["template"]["spec"].get("nodeSelector") == label


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("settings", "drain"), [({}, 120), ({"spot": "gke"}, 15)])
def test_the_pod_has_more_time_than_the_drain(kind, settings, drain):
    pod = job_spec(kubernetes(kind, **settings)[1])["template"]["spec"]
    env = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    assert env["OUTLAST_NOTICE_GRACE"] == f"{drain} s"
    assert pod["terminationGracePeriodSeconds"] == drain + SLACK_S
    (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "job")
    assert env["OUTLAST_DIR"].startswith(mount["mountPath"] + "/")


def arguments_of(documents):
    """What ``outlast run`` is given, as strings."""
    last = documents[-1]["spec"]
    if "trainer" in last:
        return last["trainer"]["args"]
    return job_spec(documents)["template"]["spec"]["containers"][0]["args"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("fewest", "told"), [(None, "3"), (2, "2:3")])
def test_several_machines_need_no_first_one(kind, fewest, told):
    documents = kubernetes(kind, nodes=3, fewest=fewest)[1]
    arguments = arguments_of(documents)
    assert arguments[: arguments.index("train.py")] == [
        *("--nnodes", told, "--rdzv-conf", "join_timeout=86400", "--nproc-per-node", "1")
    ]
    assert "Service" not in [document["kind"] for document in documents]
    spec = job_spec(documents)
    if kind == "trainjob":
        assert {documents[0]["spec"]["mlPolicy"]["numNodes"]} == {3}
        assert documents[1]["spec"]["trainer"]["numNodes"] == 3
    else:
        assert (spec["completions"], spec["parallelism"]) == (3, 3)
    if fewest is None:
        assert "successPolicy" not in spec  # all of them end, each in its own time
    else:
        # Kubernetes takes a success policy of an Indexed Job alone; a JobSet's jobs are by default.
        assert spec.get("completionMode", "Indexed") == "Indexed"
        assert spec["successPolicy"] == {"rules": [{"succeededCount": 2}]}


def test_what_each_exit_code_means_to_skypilot():
    one, several = (sky(nodes=nodes)["resources"]["job_recovery"] for nodes in (1, 2))
    assert one["recover_on_exit_codes"] == [Exit.DRAINED, 137, 143]
    assert several["recover_on_exit_codes"] == [Exit.DRAINED]
    assert one["max_restarts_on_errors"] == 0


def test_spot_machines_are_rented_where_they_can_be_had():
    """Volumes are on Kubernetes and RunPod, where SkyPilot mostly finds none."""
    for nodes, usual in ((1, True), (2, False)):
        for spot, wanted in ((None, usual), (True, True), (False, False)):
            assert sky(spot, nodes=nodes)["resources"]["use_spot"] is wanted


@pytest.mark.parametrize(
    ("bucket", "tier"),
    [("s3://b/", "s3://b/job-checkpoints"), ("gs://b", "gs://b/job"), ("r2://b", "")],
)
def test_the_bucket_is_named_as_a_tier_where_outlast_can_write_it(bucket, tier):
    training = Training(name="job", script="train.py")
    text = Sky(training=training, accelerator="H100", bucket=bucket).render()
    assert ("[[tier]]" in text) is bool(tier)
    assert f'url = "{tier}' in text or not tier


def test_names_that_yaml_would_take_for_something_else():
    training = Training(name="null", script="train.py", nodes=2)
    for document in yaml.safe_load_all(
        Kubernetes(training=training, image="i", claim="123").render()
    ):
        validator(document["kind"]).validate(document)
        assert document["metadata"]["name"] == "null"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"image": "a b"}, "not an image"),
        ({"claim": "Data"}, "kubectl get pvc"),
        ({"grace_s": 1}, "--grace 1 is not between"),
        ({"memory": "64"}, "--memory 64 is not an amount; write 64Gi"),
        ({"memory": "64Gi\n"}, "is not an amount"),
        ({"cpus_per_gpu": 0}, "--cpus-per-gpu 0 is not between"),
        ({"resources": ("rdma/ib",)}, "write --resource rdma/ib=1"),
        ({"resources": ("nvidia.com/gpu=8",)}, "say that with --gpus"),
        ({"resources": ("memory=8Gi",)}, "say that with --memory"),
        ({"resources": ("rdma/ib=1", "rdma/ib=2")}, "given twice"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused(wrong, said):
    right = {"training": Training(name="job", script="t.py"), "image": "i", "claim": "c"}
    with pytest.raises(ConfigError, match=said):
        Kubernetes(**right | wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"bucket": ""}, "either --bucket"),
        ({"volume": "v"}, "either --bucket"),
        ({"bucket": "my bucket"}, "is not a bucket"),
        ({"accelerator": ""}, "--gpu-type"),
        ({"training": Training(name="job", script="t.py", cpus=2)}, "--gpu-type and --cpus"),
        ({"training": Training(name="job", script="t.py", nodes=2)}, "--volume NAME"),
        (
            {"training": Training(name="job", script="t.py", nodes=3, fewest=2)},
            "a fixed number of machines; give --nodes 3",
        ),
    ],
)
def test_what_skypilot_could_not_run_is_refused(wrong, said):
    right = {"training": Training(name="job", script="t.py"), "accelerator": "H100"}
    with pytest.raises(ConfigError, match=said):
        Sky(**right | {"bucket": "s3://b"} | wrong)
