"""What `ctx.loader` promises after a resume."""

from __future__ import annotations

from tests.contract.conftest import Project, lines


def test_workers_have_new_random_numbers_after_a_resume(project: Project, shared_cluster: str) -> None:
    code = """
        import torch

        class Noise(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return torch.rand(1).item()

        def train(ctx, fails):
            model = ctx.prepare(torch.nn.Linear(1, 1))
            loader = ctx.loader(Noise(), batch_size=1, num_workers=1)
            ctx.resume(model=model)
            for epoch in ctx.epochs(2):
                for step, batch in enumerate(loader):
                    ctx.log({"noise": batch}, step=10 * epoch + step)
                ctx.checkpoint(model=model, step=10 * epoch + 9, epoch=epoch)
                torch.distributed.barrier()  # the first rank that fails ends the other
                if fails:
                    raise SystemExit(1)
    """
    for fails, resume in ((True, ()), (False, ("--resume", "latest", "--allow-changes"))):
        config = project.function(code, params={"fails": fails})
        project("train", config, "--cluster", shared_cluster, "--ranks", "2", *resume, rc=int(fails))
    (run,) = project.run_directories()
    seen = [row["noise"] for row in lines(run / "metrics.jsonl") if "noise" in row]
    assert len(seen) == 8
    assert len(set(seen)) == 8
