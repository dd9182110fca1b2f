"""Files whose tests only `make nightly` runs, each with the file that shows the most of it in `make test-all`.

They start the most clusters, servers and hosts, or look at what only one kind of cluster, store or tracker has. A test
of another file is marked `long` itself: its file shows the promise with another case. Most scripts of
contract/test_torchrun_matrix.py are.
"""

from __future__ import annotations

FILES = {
    "tests/contract/test_dataloader_workers.py": "test_preemption.py: a DataLoader with a worker",
    "tests/integration/test_attach.py": "test_cluster.py: a cluster of the command",
    "tests/integration/test_chaos.py": "test_failures.py, test_restart.py: single faults",
    "tests/integration/test_cluster_hosts.py": "test_ssh.py: two hosts on loopback",
    "tests/integration/test_compat.py": "tests/unit/test_compat.py: the functions of dask-pytorch-ddp",
    "tests/integration/test_hosts.py": "test_ssh.py",
    "tests/integration/test_hostile_runs.py": "tests/unit/reports: the same hostile run, without a browser",
    "tests/integration/test_images.py": "end_to_end/test_first_steps.py, test_images_sources.py",
    "tests/integration/test_import_path.py": "test_scripts.py",
    "tests/integration/test_kubernetes.py": "tests/unit/clusters/test_manifests.py",
    "tests/integration/test_sharding.py": "contract/test_prepare.py",
    "tests/integration/test_shipping.py": "contract/test_restart.py: code of the first attempt on another host",
    "tests/integration/test_slurm.py": "test_cluster.py",
    "tests/integration/test_wandb_faults.py": "contract/test_trackers.py",
    "tests/integration/test_wandb_media.py": "contract/test_trackers.py",
    "tests/unit/model_registry/test_registry_in_a_store.py": "contract/test_models.py",
    "tests/unit/results/remote/test_lease_in_a_store.py": "test_remote_results.py",
    "tests/unit/workloads/images/data/test_listing_of_a_store.py": "test_images_sources.py",
    "tests/unit/workloads/images/loader/test_loader_from_a_store.py": "unit/workloads/images/loader/test_readers.py",
}
