"""What a file that cannot be read is told with."""

import errno

import pytest

from staticllm.errors import ModelError
from staticllm.model_files.gguf_header import read_gguf_header
from staticllm.system.files import remedy_of


@pytest.mark.parametrize(("make", "remedy"), [(None, "check the path"), ("folder", "ordinary file")])
def test_a_file_that_is_missing_or_none_has_a_remedy_that_fits(tmp_path, make, remedy):
    path = tmp_path / "model.gguf"
    if make:
        path.mkdir()
    with pytest.raises(ModelError, match=f"cannot be read.*{remedy}") as refused:
        read_gguf_header(path)
    assert "permissions" not in str(refused.value)


def test_a_file_that_may_not_be_read_or_lies_on_a_bad_disk_has_another_remedy():
    assert remedy_of(PermissionError(errno.EACCES, "Permission denied")) == "check its permissions"
    assert remedy_of(OSError(errno.EIO, "Input/output error")) == "check the disk that it is on"
