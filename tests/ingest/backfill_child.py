"""A backfill over stores on disk in a process of its own, which may be killed. Run as `python -m`.

Arguments: folder of the stores, file of rows, number of threads, and where to die: `put:20` is at the 20th put. Prints
what was there before and what the run cost, as one line of JSON.
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from ingest.fakes import DIM
from ingest.runners import Runner
from schemas.settings import QdrantSettings
from stores.blobs import open_blobs
from stores.fakes import CrashPoint, kill, with_faults
from stores.kv_store import KvStore
from stores.vectors import open_index
from tests.ingest.backfilling import backfill
from tests.ingest.world import World


def main(folder, rows, threads, dies):
    """One life."""
    world = World()
    generation = world.index_parts.generation.name
    (folder / "blobs").mkdir(exist_ok=True)
    index = open_index(QdrantSettings(), str(folder / "qdrant"), generation, DIM)
    index.ensure()
    kv = KvStore(open_blobs((folder / "blobs").as_uri(), {}), generation)
    heads = list(index.documents())
    before = {"heads": len(heads), "artifacts": sum(len(list(kv.keys(head.document))) for head in heads)}
    faults = {"flip": [], "put": []}
    if dies:
        call, at = dies.split(":")
        faults[call].append(CrashPoint(call, int(at), kill))
    parts = {"index": with_faults(index, *faults["flip"]), "kv": with_faults(kv, *faults["put"])}
    world.qdrant, world.kv = index, kv
    world.index_parts = replace(world.index_parts, **parts)
    world.prefill_parts = replace(world.prefill_parts, **parts)
    options = (f"--direct_num_workers={threads}", "--direct_running_mode=multi_threading") if int(threads) > 1 else ()
    done = backfill(world, rows, runner=Runner("local", options))
    world.assert_clean()
    cost = {"embedded": len(world.embedder.embedded), "puts": parts["kv"].calls["put"]}
    print(json.dumps({"before": before, "cost": cost, "done": asdict(done)}))
    index.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
