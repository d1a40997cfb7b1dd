"""Puts stack.yaml and the files that it names together: `python assemble.py > stack.json`.

One stack.json can be deployed as it is, without a tool that gathers files and a bucket to put them in.
"""

import json
import pathlib

import yaml

HERE = pathlib.Path(__file__).resolve().parent


class Loader(yaml.SafeLoader):
    """YAML with CloudFormation's short functions: `!Ref X` is {"Ref": "X"}, `!Sub X` {"Fn::Sub": "X"}."""


def _function(loader, suffix, node):
    kinds = {yaml.ScalarNode: loader.construct_scalar, yaml.SequenceNode: lambda n: loader.construct_sequence(n, deep=True)}
    value = kinds[type(node)](node)
    if suffix == "GetAtt":
        value = value.split(".", 1)
    return {suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}": value}


Loader.add_multi_constructor("!", _function)


def assembled():
    return _with_files(yaml.load((HERE / "stack.yaml").read_text(), Loader))


def _with_files(value):
    if isinstance(value, dict):
        return {key: _with_files(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_with_files(v) for v in value]
    if isinstance(value, str) and value.startswith("file:"):
        path = HERE / value.removeprefix("file:")
        return json.loads(path.read_text()) if path.suffix == ".json" else path.read_text()
    return value


def text():
    return json.dumps(assembled(), indent=1) + "\n"


if __name__ == "__main__":
    print(text(), end="")
