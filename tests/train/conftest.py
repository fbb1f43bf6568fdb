import pytest

from tests.train.small import write_digits


@pytest.fixture(scope="session")
def digit_folder(tmp_path_factory):
    """10 classes of 12 real digits, JPEG."""
    return write_digits(tmp_path_factory.mktemp("digits") / "images", 12)
