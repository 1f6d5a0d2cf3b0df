"""Public trainings that the two lines make train in float16.

`python -m benchmarks.public FOLDER` edits programs of public repositories, trains each
in float32 and in float16, and writes `results/public.json` and `results/public.md`.
"""
