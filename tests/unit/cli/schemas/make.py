"""Makes the schemas beside this file from what their projects publish. Not run by any test.

    pip download --no-deps kubernetes-validate==1.37.0 skypilot==0.14.1      # and unpack both
    git show HEAD:config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml   # as jobset.yaml
    git show HEAD:manifests/base/crds/trainer.kubeflow.org_trainingruntimes.yaml   # likewise
    git show HEAD:manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml
    python make.py FOLDER                                        # the folder with all of these

Made from kubernetes-validate 1.37.0 (Kubernetes' own OpenAPI, v1.37.0), kubernetes-sigs/jobset at
08dfbdfd (v0.12), kubeflow/trainer at 8c0f5059 (v2.3) and skypilot 0.14.1, all under Apache-2.0.

Only what a manifest of ours can reach is kept, without descriptions. An object takes no property
that it does not name, as `kubectl apply` with strict field validation would have it.
"""

import enum
import json
import re
import sys
import types
import unittest.mock
from pathlib import Path

import yaml

DROPPED = {"description", "default", "example", "format", "title"}
K8S = "kubernetes_validate/kubernetes-json-schema/v1.37.0-local-strict"
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def tidy(schema):
    """Without words for people, and closed."""
    if isinstance(schema, list):
        return [tidy(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key == "properties":
            found[key] = {name: tidy(part) for name, part in value.items()}
        elif key == "$ref":
            found[key] = "#/$defs/" + value.rpartition("/")[2]
        elif key not in DROPPED and not key.startswith("x-") and key not in ("$id", "$schema"):
            found[key] = tidy(value)
    if any_case := found.pop("case_insensitive_enum", None):
        found["enum"] = sorted({*map(str.lower, any_case), *map(str.upper, any_case)})
    if schema.get("x-kubernetes-int-or-string"):
        found["type"] = ["integer", "string"]
        found.pop("anyOf", None)
    if "properties" in found and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def names(schema):
    """The definitions that a schema refers to."""
    if isinstance(schema, list):
        return {name for item in schema for name in names(item)}
    if not isinstance(schema, dict):
        return set()
    here = {schema["$ref"].rpartition("/")[2]} if isinstance(schema.get("$ref"), str) else set()
    return here | {name for value in schema.values() for name in names(value)}


def kubernetes(folder):
    everything = json.loads((folder / K8S / "_definitions.json").read_text())["$defs"]
    kept = {}
    wanted = {
        "io.k8s.api.batch.v1.Job",
        "io.k8s.api.batch.v1.JobTemplateSpec",
        "io.k8s.api.core.v1.Service",
    }
    while wanted:
        name = wanted.pop()
        kept[name] = tidy(everything[name])
        wanted |= names(kept[name]) - set(kept)
    return kept


def custom(path):
    """A custom resource's schema; its metadata is any object's, and its status is not ours."""
    resource = yaml.safe_load(path.read_text())
    version = resource["spec"]["versions"][-1]
    schema = tidy(version["schema"]["openAPIV3Schema"])
    schema["properties"].pop("status", None)
    schema["properties"]["metadata"] = {
        "$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
    }
    group, kind = resource["spec"]["group"], resource["spec"]["names"]["kind"]
    schema["properties"]["apiVersion"] = {"const": f"{group}/{version['name']}"}
    schema["properties"]["kind"] = {"const": kind}
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return kind, schema


def manifests(folder):
    defs = kubernetes(folder)
    template = {"$ref": "#/$defs/io.k8s.api.batch.v1.JobTemplateSpec"}
    for file in ("jobset", "trainingruntimes", "trainjobs"):
        kind, schema = custom(folder / f"{file}.yaml")
        spec = schema["properties"]["spec"]["properties"]
        if kind == "JobSet":
            # A job's template inside is Kubernetes' own; so is a claim's.
            spec["replicatedJobs"]["items"]["properties"]["template"] = template
            spec.pop("volumeClaimPolicies", None)
        elif kind == "TrainingRuntime":
            spec["template"]["properties"]["spec"] = {"$ref": "#/$defs/JobSetSpec"}
        else:
            spec.pop("runtimePatches", None)
            spec.pop("initializer", None)
        defs[kind] = schema
    defs["JobSetSpec"] = defs["JobSet"]["properties"]["spec"]
    return defs


def sky(folder):
    """SkyPilot's schemas are Python; what they import is replaced by what they need of it."""
    constants = types.ModuleType("sky.skylet.constants")
    source = (folder / "sky/skylet/constants.py").read_text()
    start = source.index("ALL_CLOUDS = ")
    exec(source[start : source.index(")\n", start) + 2], constants.__dict__)
    constants.ENV_VAR_IS_SKYPILOT_SERVER = "IS_SKYPILOT_SERVER"
    constants.__getattr__ = lambda name: name
    fakes = {"sky": types.ModuleType("sky"), "sky.skylet": types.ModuleType("sky.skylet")}
    fakes["sky.utils"] = types.ModuleType("sky.utils")
    fakes["sky.data"] = types.ModuleType("sky.data")
    fakes["sky.data"].storage = _enums((folder / "sky/data/storage.py").read_text())
    fakes["sky.skylet"].constants = constants
    fakes["sky.skylet"].autostop_lib = unittest.mock.MagicMock()
    fakes["sky.utils"].kubernetes_enums = unittest.mock.MagicMock()
    with unittest.mock.patch.dict(sys.modules, fakes):
        module = types.ModuleType("schemas")
        exec((folder / "sky/utils/schemas.py").read_text(), module.__dict__)
        module._allow_additional_properties = lambda: False
        module._task_config_schema = dict
        task, storage = module.get_task_schema(), module.get_storage_schema()
        resources = module.get_resources_schema()
    for part in ("config", "volume_mounts"):
        task["properties"].pop(part)
    task["properties"]["resources"] = keep(
        resources,
        *("infra", "accelerators", "cpus", "memory", "use_spot", "job_recovery", "any_of"),
        *("image_id", "disk_size", "ports", "labels"),
    )
    task["properties"]["resources"]["properties"].pop("any_of", None)
    task["properties"]["file_mounts"] = {
        "type": "object",
        "additionalProperties": {"anyOf": [{"type": "string"}, storage]},
    }
    return task


def _enums(source):
    """The enumerations of a source file, without the rest of it."""
    module = types.ModuleType("storage")
    for name in ("StoreType", "StorageMode", "FileMountType"):
        body = source.partition(f"class {name}(enum.Enum):")[2].partition("\nclass ")[0]
        setattr(module, name, enum.Enum(name, re.findall(r"^    (\w+) = '", body, re.M)))
        for member in getattr(module, name):
            member._value_ = member.name
    return module


def keep(schema, *properties):
    left = {name: schema["properties"][name] for name in properties if name in schema["properties"]}
    return schema | {"properties": left}


def write(name, schema):
    Path(__file__).with_name(name).write_text(
        json.dumps(schema, sort_keys=True, separators=(",", ":"), default=str) + "\n"
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write("manifests.json", {"$schema": DIALECT, "$defs": manifests(folder)})
    write("sky-task.json", {"$schema": DIALECT} | tidy(sky(folder)))
