"""Download the public data sets of surveillance video that results are reported on."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from cdt_fast.checks import InputError

_NO_LICENSE = "carries no license: it is for research use as granted by its authors; never redistribute it"


class Dataset(NamedTuple):
    """A data set that can be fetched."""

    title: str
    url: str  # where its authors offer the archive
    sha256: str  # of the archive, in hexadecimal
    terms: str  # what its use is bound to, as the end of a sentence that begins with the title


DATASETS = {
    "avenue": Dataset(
        "CUHK Avenue",
        "http://www.cse.cuhk.edu.hk/leojia/projects/detectabnormal/Avenue_Dataset.zip",
        "fc9cb8432a11ca79c18aa180c72524011411b69d3b0ff27c8816e41c0de61531",
        _NO_LICENSE,
    ),
    "ucsd": Dataset(
        "UCSD Anomaly Detection (Ped1 and Ped2)",
        "http://www.svcl.ucsd.edu/projects/anomaly/UCSD_Anomaly_Dataset.tar.gz",
        "2329af326951f5097fdd114c50e853957d3e569493a49d22fc082a9fd791915b",
        _NO_LICENSE,
    ),
    "shanghaitech": Dataset(
        "ShanghaiTech Campus",
        "http://101.32.75.151:8181/dataset/shanghaitech.tar.gz",
        "c13a827043b259ccf8493c9d9130486872992153a9d714fe229e523cd4c94116",
        "is offered by its authors for research; read their terms before any other use",
    ),
}


def fetch(name: str, folder: str | os.PathLike[str], *, progress: bool = True) -> Path:
    """Download and unpack a data set of `DATASETS` to `<folder>/<name>`, unless it is there; return that folder.

    The folder appears only when it is complete. `progress` shows a bar on stderr.

    Raises:
        InputError: no such data set, the download fails, the archive has another checksum, or the disk is full.
    """
    dataset = DATASETS.get(name)
    if dataset is None:
        raise InputError(f"{name}: no such data set; expected one of {', '.join(DATASETS)}")
    place = Path(folder) / name
    if place.exists():
        print(f"{name}: already at {place}", file=sys.stderr)
        return place
    print(f"{dataset.title} {dataset.terms}", file=sys.stderr)
    from torch.hub import download_url_to_file

    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=place.parent) as temporary:
        archive, unpacked = Path(temporary) / Path(dataset.url).name, Path(temporary) / name
        try:
            download_url_to_file(dataset.url, str(archive), dataset.sha256, progress)
            # A zip is always unpacked below its folder, and takes no filter.
            shutil.unpack_archive(archive, unpacked, filter=None if archive.suffix == ".zip" else "data")
            unpacked.rename(place)
        except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError: another checksum
            raise InputError(f"{dataset.url}: cannot be fetched ({error})") from error
    print(f"{name}: unpacked to {place}", file=sys.stderr)
    return place
