"""What a model is called in the API where nobody says so."""

import pytest

from vlm_worker.settings import ServeSettings, parse


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("examples/shapes/model", "shapes"),
        ("/models/llava/", "llava"),
        ("hf://org/tiny-vlm", "tiny-vlm"),
    ],
)
def test_a_model_is_served_under_the_name_of_its_folder(model: str, name: str):
    settings = parse(["serve", model, "--model-revision=abc"], {})
    assert isinstance(settings, ServeSettings)
    assert settings.gateway.served_name == settings.worker.served_name == name
