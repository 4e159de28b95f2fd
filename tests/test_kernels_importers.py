"""Rows from Dynamo's profiler and `vllm bench`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from profiles.importers import BenchRun, find_dynamo, read_dynamo, read_vllm_latency, read_vllm_throughput
from profiles.rows import Point, Row, parse_rows, rows_text

from dsim.errors import InputError  # isort: skip


def decode_file(path: Path, **changes: object) -> Path:
    arrays = {
        "x_kv_usage": [0.1, 0.5, 0.5],
        "y_context_length": [1000.0, 1000.0, 500.0],
        "z_itl": [8.0, 12.0, 13.0],
        "z_thpt_per_gpu": [1.0, 2.0, 3.0],
        "max_kv_tokens": [100_000],
        **changes,
    }
    np.savez(path, **{name: np.array(value) for name, value in arrays.items()})  # type: ignore[arg-type]
    return path


def latency_file(path: Path, *latencies: float) -> Path:
    path.write_text(json.dumps({"avg_latency": float(np.mean(latencies)), "latencies": latencies, "percentiles": {}}))
    return path


class TestDynamo:
    def test_prefill(self, tmp_path: Path) -> None:
        np.savez(
            tmp_path / "raw_data.npz", prefill_isl=[128, 1024], prefill_ttft=[10.0, 50.0], prefill_thpt_per_gpu=[1, 2]
        )
        rows = read_dynamo(tmp_path / "raw_data.npz", tp=2)
        assert rows == [Row(Point("prefill", 2, 1, 128), 0.01), Row(Point("prefill", 2, 1, 1024), 0.05)]

    def test_decode(self, tmp_path: Path) -> None:
        rows = read_dynamo(decode_file(tmp_path / "raw_data.npz"), tp=1)
        assert [(row.point.requests, row.point.context_tokens) for row in rows] == [(10, 1000), (50, 1000), (100, 500)]
        assert [row.step_s for row in rows] == pytest.approx([0.008, 0.012, 0.013])
        assert parse_rows(rows_text(rows).encode(), file="rows.csv").ok

    def test_seconds_and_json(self, tmp_path: Path) -> None:
        file = tmp_path / "prefill_raw_data.json"
        file.write_text(json.dumps({"prefill_isl": [128], "prefill_ttft": [0.01]}))
        assert read_dynamo(file, tp=1, unit="s")[0].step_s == 0.01
        assert find_dynamo(tmp_path) == [file]

    @pytest.mark.parametrize(
        ("changes", "rule"),
        [
            ({"z_itl": [8.0, 12.0]}, "different lengths"),
            ({"z_itl": [8.0, -1.0, 13.0]}, "z_itl=-1.0 must be > 0"),
            ({"x_kv_usage": [10.0, 50.0, 50.0]}, "x_kv_usage=10.0 must be <= 1, a share"),
            ({"z_itl": [8.0, float("nan"), 13.0]}, "must be a finite number"),
            ({"max_kv_tokens": [1, 2]}, "must be one number"),
            ({"z_itl": ["a", "b", "c"]}, "z_itl must be numbers"),
        ],
    )
    def test_refused(self, tmp_path: Path, changes: dict[str, object], rule: str) -> None:
        with pytest.raises(InputError, match=rule):
            read_dynamo(decode_file(tmp_path / "raw_data.npz", **changes), tp=1)

    def test_other_files(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", a=[1])
        with pytest.raises(InputError, match="holds a; expected prefill_isl"):
            read_dynamo(tmp_path / "a.npz", tp=1)
        (tmp_path / "b.npz").write_text("no")
        with pytest.raises(InputError, match=r"is no \.npz file"):
            read_dynamo(tmp_path / "b.npz", tp=1)
        np.savez(tmp_path / "c.npz", prefill_isl=np.array([{}], dtype=object))
        with pytest.raises(InputError, match=r"is no \.npz file of plain numbers"):
            read_dynamo(tmp_path / "c.npz", tp=1)
        with pytest.raises(InputError, match="cannot be read"):
            read_dynamo(tmp_path / "d.npz", tp=1)
        with pytest.raises(InputError, match="no results of Dynamo's profiler"):
            find_dynamo(tmp_path)
        with pytest.raises(InputError, match="must be ms or s"):
            read_dynamo(tmp_path / "a.npz", tp=1, unit="us")


class TestVllmLatency:
    def test_differences(self, tmp_path: Path) -> None:
        runs = [
            BenchRun(8, 32, 129, latency_file(tmp_path / "long.json", 1.31, 1.30, 9.0)),
            BenchRun(8, 32, 1, latency_file(tmp_path / "short.json", 0.03)),
        ]
        prefill, decode = read_vllm_latency(runs, tp=4)
        assert prefill == Row(Point("prefill", 4, 8, 32), 0.03)
        assert decode.point == Point("decode", 4, 8, context_tokens=32 + 65)
        assert decode.step_s == pytest.approx(1.28 / 128)

    def test_refused(self, tmp_path: Path) -> None:
        long = BenchRun(8, 32, 128, latency_file(tmp_path / "long.json", 1.3))
        with pytest.raises(InputError, match="no run of 8 x 32 tokens with a shorter output"):
            read_vllm_latency([long], tp=1)
        slow = BenchRun(8, 32, 1, latency_file(tmp_path / "slow.json", 1.4))
        with pytest.raises(InputError, match="takes no longer than"):
            read_vllm_latency([long, slow], tp=1)
        with pytest.raises(InputError, match="is the second run of 8 x 32"):
            read_vllm_latency([long, long], tp=1)
        (tmp_path / "bad.json").write_text("{}")
        with pytest.raises(InputError, match="avg_latency is missing"):
            read_vllm_latency([BenchRun(1, 1, 1, tmp_path / "bad.json")], tp=1)
        for option in ("--vllm-latency", "--vllm-throughput"):
            with pytest.raises(InputError, match=f"{option}: '8x32=a' is no run; write REQUESTSxPROMPT"):
                BenchRun.parse("8x32=a", option)


class TestVllmThroughput:
    def file(self, path: Path, **changes: object) -> Path:
        data = {"elapsed_time": 10.0, "num_requests": 100, "total_num_tokens": 102_400, "requests_per_second": 10.0}
        path.write_text(json.dumps(data | changes))
        return path

    def test_full_steps(self, tmp_path: Path) -> None:
        run = BenchRun(100, 1024, 1, self.file(tmp_path / "a.json"))
        assert read_vllm_throughput([run], tp=1, step_tokens=8192) == [Row(Point("prefill", 1, 8, 1024), 0.8)]

    def test_refused(self, tmp_path: Path) -> None:
        file = self.file(tmp_path / "a.json")
        for run, rule in (
            (BenchRun(100, 1024, 128, file), "mixes steps of all kinds"),
            (BenchRun(10, 1024, 1, file), "num_requests=100.0 is not the 10 requests"),
            (BenchRun(100, 128, 1, file), "too little for steps of 8192"),
            (BenchRun(100, 16384, 1, file), "too little for steps of 8192"),
        ):
            with pytest.raises(InputError, match=rule):
                read_vllm_throughput([run], tp=1, step_tokens=8192)
