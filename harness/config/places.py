"""Names of files: paths, URLs, images, and names of Hugging Face."""

from __future__ import annotations

HUB = "hf:"  # before a folder or a name of Hugging Face
JPEG_SUFFIXES = (".jpg", ".jpeg", ".jfif")
IMAGE_SUFFIXES = (*JPEG_SUFFIXES, ".png", ".webp", ".gif", ".tif", ".tiff", ".bmp")  # in lower case
IMAGE_STARTS = {  # of the files
    "JPEG": rb"\xff\xd8",
    "PNG": rb"\x89PNG",
    "WebP": rb"RIFF....WEBP",
    "GIF": rb"GIF8",
    "TIFF": rb"II\*\0|MM\0\*",
    "BMP": rb"BM",
}


def is_url(place: str) -> bool:
    """Return True for a URL of any scheme, such as s3://bucket/run; False for a path."""
    return "://" in place
