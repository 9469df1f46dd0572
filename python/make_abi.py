"""Writes epmoe/_abi.py from the public header: enums, structs and functions as ctypes sees them.

    python3 make_abi.py ../include/epmoe/epmoe.h > epmoe/_abi.py

The header is regular on purpose: one declaration per field, enums with explicit values, no nested definitions.
"""

import re
import sys

SCALARS = {
    "int32_t": "c_int32", "int64_t": "c_int64", "uint64_t": "c_uint64", "size_t": "c_size_t", "float": "c_float",
    "double": "c_double", "char": "c_char",
}
HEAD = '''"""The binary interface of libepmoe as ctypes sees it. Written by make_abi.py from epmoe.h: change that, not this."""

from ctypes import (CFUNCTYPE, POINTER, Structure, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t,
                    c_uint64, c_void_p)

'''


def read(path):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    statuses = re.findall(r"X\((\w+), (\d+),", text)
    text = re.sub(r"\\\n", " ", text)
    text = re.sub(r"^ *#.*$", "", text, flags=re.M)
    return statuses, re.sub(r"\s+", " ", text)


class Types:
    """What a C type is in ctypes: enums are 32-bit, handles and data are addresses."""

    def __init__(self, structs, enums):
        self.structs, self.enums = structs, enums

    def value(self, text):
        text = text.replace("const ", "").replace(" const", "").replace("struct ", "").strip()
        if text in SCALARS:
            return SCALARS[text]
        if text in self.enums:
            return "c_int32"
        if text in self.structs:
            return text
        if text == "epmoe_log_fn":
            return "epmoe_log_fn"
        if text == "char *":
            return "c_char_p"
        if text == "epmoe_stream_t":
            return "c_void_p"
        target = text[:-1].strip()
        if text.endswith("*") and (target in self.structs or target.endswith("*")):
            return f"POINTER({self.value(target)})" if target in self.structs else "POINTER(c_void_p)"
        if text.endswith("*"):
            return "c_void_p"
        raise ValueError(f"no ctypes type for '{text}'")

    def result(self, text):
        return "None" if text.strip() == "void" else self.value(text)

    def parameters(self, text):
        if text.strip() == "void":
            return []
        return [self.value(split_name(parameter)[0]) for parameter in text.split(",")]

    def callback(self, result, parameters):
        return f"CFUNCTYPE({', '.join([self.result(result)] + self.parameters(parameters))})"


def split_name(declaration):
    """'const float *bias' -> ('const float *', 'bias')"""
    type_, name = re.fullmatch(r"\s*(.*?[ *])(\w+)\s*", declaration).groups()
    return type_.strip(), name


def main(path):
    statuses, text = read(path)
    structs = re.findall(r"typedef struct (\w+_t) \{(.*?)\} \1;", text)
    enums = re.findall(r"typedef enum (\w+_t) \{(.*?)\} \1;", text)
    types = Types([name for name, _ in structs], [name for name, _ in enums])
    out = [HEAD]
    for name, body in enums:
        values = [(f"EPMOE_{status}", value) for status, value in statuses] if name == "epmoe_status_t" else \
            re.findall(r"(EPMOE_\w+) = (-?\d+)", body)
        out.append(f"# {name}\n" + "".join(f"{key} = {value}\n" for key, value in values) + "\n")
    result, parameters = re.search(r"typedef (\w+) \(\*epmoe_log_fn\)\((.*?)\);", text).groups()
    out.append(f"epmoe_log_fn = {types.callback(result, parameters)}\n")
    for name, body in structs:
        fields = []
        for declaration in filter(str.strip, body.split(";")):
            function = re.fullmatch(r"\s*(\w+) \(\*(\w+)\)\((.*)\)\s*", declaration)
            array = re.fullmatch(r"(.*)\[(\w+)\]\s*", declaration)
            if function:
                fields.append((function[2], types.callback(function[1], function[3])))
            elif array:
                type_, field = split_name(array[1])
                fields.append((field, f"{types.value(type_)} * {array[2]}"))
            else:
                type_, field = split_name(declaration)
                fields.append((field, types.value(type_)))
        lines = "".join(f'        ("{field}", {type_}),\n' for field, type_ in fields)
        out.append(f"\n\nclass {name}(Structure):\n    _fields_ = [\n{lines}    ]\n")
    out.append("\n\n# name: (result, parameters)\nFUNCTIONS = {\n")
    for declaration in re.findall(r"EPMOE_API ([^;]*);", text):
        result, name, parameters = re.fullmatch(r"(.*?[ *])(epmoe_\w+)\((.*)\)", declaration.strip()).groups()
        out.append(f'    "{name}": ({types.result(result)}, [{", ".join(types.parameters(parameters))}]),\n')
    out.append("}\n")
    sys.stdout.write("".join(out))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
