"""Folders of the project that tests read: pages, scripts, golden artifacts."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "artifacts" / "golden"
