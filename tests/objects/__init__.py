"""The cold tier on a server that speaks S3's protocol: `make test WITH=objects`."""
