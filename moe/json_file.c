#include "moe/json_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_JSON_BYTES 100000000

epmoe_status_t epmoei_file_open(const char *path, int *fd, int64_t *bytes)
{
    /* O_NONBLOCK: opening a FIFO must not wait for a writer. It does not matter for regular files. */
    int opened = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (opened < 0) return epmoei_fail(EPMOE_ERROR_IO, "%s: cannot be opened: %s", path, strerror(errno));
    struct stat info;
    if (fstat(opened, &info)) {
        int error = errno;
        close(opened);
        return epmoei_fail(EPMOE_ERROR_IO, "%s: cannot be examined: %s", path, strerror(error));
    }
    if (!S_ISREG(info.st_mode)) {
        close(opened);
        return epmoei_fail(EPMOE_ERROR_IO, "%s: is not a regular file", path);
    }
    *fd = opened;
    *bytes = (int64_t)info.st_size;
    return EPMOE_OK;
}

epmoe_status_t epmoei_file_read(int fd, const char *path, int64_t offset, void *data, int64_t bytes)
{
    for (int64_t done = 0; done < bytes;) {
        ssize_t got = pread(fd, (char *)data + done, (size_t)(bytes - done), (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return epmoei_fail(EPMOE_ERROR_IO, "%s: cannot be read: %s", path, strerror(errno));
        if (got == 0)
            return epmoei_fail(EPMOE_ERROR_IO, "%s: ended at byte %lld while it was read", path,
                               (long long)(offset + done));
        done += got;
    }
    return EPMOE_OK;
}

/* The key that ends just before text[end]: the parser's message names keys only when they are short. */
static int64_t key_start(const char *text, int64_t end)
{
    if (end < 2 || text[end - 1] != '"') return -1;
    for (int64_t i = end - 2; i >= 0; i--) {
        if (text[i] != '"') continue;
        int64_t backslashes = 0;
        while (backslashes < i && text[i - 1 - backslashes] == '\\') backslashes++;
        if (backslashes % 2 == 0) return i + 1;
    }
    return -1;
}

epmoe_status_t epmoei_json_parse(const char *text, int64_t bytes, const char *path, json_t **object)
{
    json_error_t error;
    errno = 0;
    json_t *root = json_loadb(text, (size_t)bytes, JSON_REJECT_DUPLICATES, &error);
    if (!root) {
        enum json_error_code code = json_error_code(&error);
        /* Where the parser gets no memory it often says nothing, or that the token at hand is invalid. */
        if (code == json_error_out_of_memory || errno == ENOMEM)
            return epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "%s: no memory for %lld bytes of JSON", path,
                               (long long)bytes);
        int64_t end = error.position <= bytes ? error.position : 0;
        int64_t start = code == json_error_duplicate_key ? key_start(text, end) : -1;
        if (start >= 0)
            return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: %.*s is there twice in one JSON object", path,
                               (int)epmoei_min64(end - 1 - start, 256), text + start);
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: invalid JSON at line %d, column %d: %s", path, error.line,
                           error.column, error.text);
    }
    if (!json_is_object(root)) {
        json_decref(root);
        return epmoei_fail(EPMOE_ERROR_FORMAT, "%s: the JSON is not an object", path);
    }
    *object = root;
    return EPMOE_OK;
}

epmoe_status_t epmoei_json_read(const char *path, json_t **object)
{
    int fd = -1;
    int64_t bytes = 0;
    void *text = NULL;
    epmoe_status_t status = epmoei_file_open(path, &fd, &bytes);
    if (status != EPMOE_OK) return status;
    if (bytes > MAX_JSON_BYTES) {
        status = epmoei_fail(EPMOE_ERROR_FORMAT, "%s: has %lld bytes: expected at most %d", path, (long long)bytes,
                             MAX_JSON_BYTES);
        goto done;
    }
    EPMOEI_CHECK_GOTO(epmoei_alloc_for(&text, bytes, path), done);
    EPMOEI_CHECK_GOTO(epmoei_file_read(fd, path, 0, text, bytes), done);
    EPMOEI_CHECK_GOTO(epmoei_json_parse(text, bytes, path, object), done);
done:
    epmoei_free(text);
    close(fd);
    return status;
}
