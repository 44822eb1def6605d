import pytest


@pytest.fixture(autouse=True)
def keep_log_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the process's logging as it is: other tests read warnings."""
    monkeypatch.setattr("sgl_jax.doctor.__main__.log_to_terminal", lambda level, form: None)
