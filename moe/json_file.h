/* Reading small files whole and JSON out of them, with messages that name the file. */
#ifndef EPMOEI_JSON_FILE_H
#define EPMOEI_JSON_FILE_H

#include "base/base.h"

#include <jansson.h>

/* Opens a regular file for reading; IO otherwise. The descriptor is the caller's. */
epmoe_status_t epmoei_file_open(const char *path, int *fd, int64_t *bytes);
/* Reads bytes [offset, offset+bytes) of a file; IO when they cannot be had. */
epmoe_status_t epmoei_file_read(int fd, const char *path, int64_t offset, void *data, int64_t bytes);

/* Parses text that must be one JSON object; duplicate keys are an error at every depth. FORMAT messages start with
 * `path`. The result is the caller's (json_decref). */
epmoe_status_t epmoei_json_parse(const char *text, int64_t bytes, const char *path, json_t **object);
/* The same from a file. IO when it cannot be read, FORMAT above 100 MB. */
epmoe_status_t epmoei_json_read(const char *path, json_t **object);

#endif
