"""Iceberg's jar for Spark, out of the Python package snowpark-connect-deps-iceberg, made whole.

That package has taken the copy of Jackson out of the jar which Iceberg's classes are linked to.
Here PySpark's own Jackson takes its place, under the names that Iceberg's classes look for: in a
class file all names are in its table of constants.
"""

import struct
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "snowpark_connect_deps_iceberg"
JACKSON = ("jackson-annotations-", "jackson-core-", "jackson-databind-")
NAME = "com/fasterxml/jackson"
PLACE = "org/apache/iceberg/shaded/"

UTF8 = 1
SIZES = {3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4}
SIZES |= {15: 3, 16: 2, 17: 4, 18: 4, 19: 2, 20: 2}
"""Bytes of a constant behind its tag."""
DOUBLE = (5, 6)
"""long and double take two places in the table."""


def iceberg_jars(folder: Path) -> list[Path]:
    """For `spark.jars`: of Iceberg for Spark 3.5, whose Java part is that of all, and the Scala of
    PySpark 4. Empty where the package is not installed. `folder`: where to make what is missing."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return []
    found = sorted((Path(spec.origin).parent / "jars").glob("iceberg-spark-runtime-*_2.13-*.jar"))
    if not found:
        return []
    with zipfile.ZipFile(found[-1]) as jar:
        names = jar.namelist()
    if any(name.startswith(PLACE + NAME) for name in names):
        return [found[-1]]
    made = folder / "jackson-for-iceberg.jar"
    relocate(_spark_jars(), made)
    return [found[-1], made]


def _spark_jars() -> list[Path]:
    import pyspark

    jars = sorted((Path(pyspark.__file__).parent / "jars").glob("jackson-*.jar"))
    return [
        next(jar for jar in jars if jar.name.startswith(name) and jar.name[len(name)].isdigit())
        for name in JACKSON
    ]


def relocate(jars: list[Path], made: Path) -> None:
    """The classes of some jars under names with PLACE in front."""
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as target:
        for jar in jars:
            with zipfile.ZipFile(jar) as source:
                for name in source.namelist():
                    if name.startswith(NAME) and name.endswith(".class"):
                        target.writestr(PLACE + name, renamed(source.read(name)))


def renamed(data: bytes) -> bytes:
    """A class file with other names in its table of constants."""
    places = {}
    for old, new in ((NAME, PLACE + NAME), (_dotted(NAME), _dotted(PLACE + NAME))):
        places[old.encode()] = new.encode()
    (count,) = struct.unpack_from(">H", data, 8)
    result = [data[:10]]
    at, index = 10, 1
    while index < count:
        tag = data[at]
        if tag == UTF8:
            (length,) = struct.unpack_from(">H", data, at + 1)
            text = data[at + 3 : at + 3 + length]
            for old_name, new_name in places.items():
                text = text.replace(old_name, new_name)
            result.append(struct.pack(">BH", UTF8, len(text)) + text)
            at += 3 + length
        else:
            result.append(data[at : at + 1 + SIZES[tag]])
            at += 1 + SIZES[tag]
        index += 2 if tag in DOUBLE else 1
    result.append(data[at:])
    return b"".join(result)


def _dotted(name: str) -> str:
    return name.replace("/", ".")


if __name__ == "__main__":
    print(*iceberg_jars(Path(sys.argv[1])), sep=",")
