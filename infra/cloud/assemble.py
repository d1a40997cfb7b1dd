"""Puts the templates and the files that they name together: `python assemble.py` writes stack.json and region.json.

Each can be deployed as it is, without a tool that gathers files and a bucket to put them in.
"""

import json
import pathlib

import yaml

HERE = pathlib.Path(__file__).resolve().parent
NAMES = ("stack", "region")


class Loader(yaml.SafeLoader):
    """YAML with CloudFormation's short functions: `!Ref X` is {"Ref": "X"}, `!Sub X` {"Fn::Sub": "X"}."""


def _function(loader, suffix, node):
    kinds = {yaml.ScalarNode: loader.construct_scalar, yaml.SequenceNode: lambda n: loader.construct_sequence(n, deep=True)}
    value = kinds[type(node)](node)
    if suffix == "GetAtt":
        value = value.split(".", 1)
    return {suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}": value}


Loader.add_multi_constructor("!", _function)


def assembled(name):
    """`region`: region.yaml; `stack`: what is in each region and what there is once, in one."""
    region, whole = (yaml.load((HERE / f"{part}.yaml").read_text(), Loader) for part in ("region", name))
    for section in ("Parameters", "Conditions", "Resources", "Outputs"):
        whole[section] = region[section] | whole.get(section, {})
    return _with_files(whole)


def _with_files(value):
    if isinstance(value, dict):
        return {key: _with_files(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_with_files(v) for v in value]
    if isinstance(value, str) and value.startswith("file:"):
        path = HERE / value.removeprefix("file:")
        return json.loads(path.read_text()) if path.suffix == ".json" else path.read_text()
    return value


def text(name):
    return json.dumps(assembled(name), indent=1) + "\n"


if __name__ == "__main__":
    for name in NAMES:
        (HERE / f"{name}.json").write_text(text(name))
