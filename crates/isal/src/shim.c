/*
 * Keeps ISA-L's large structures on the C side: their layout differs between releases, so Rust sees opaque
 * pointers and the compiler of this file sees the header that belongs to the library.
 */
#include <isa-l/crc.h>
#include <isa-l/igzip_lib.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

struct ts_deflater {
    struct isal_zstream stream;
    uint8_t *level_buf;
    uint32_t level_buf_size;
    uint32_t level;
};

/* The small buffers: shorter blocks suit packets better (ratio 3.49, not 3.47, at the same speed) and take less cache. */
static const uint32_t level_buf_sizes[] = {
    ISAL_DEF_LVL0_SMALL, ISAL_DEF_LVL1_SMALL, ISAL_DEF_LVL2_SMALL, ISAL_DEF_LVL3_SMALL,
};

static void *aligned(size_t size)
{
    void *p = NULL;

    return posix_memalign(&p, 64, size) ? NULL : p;
}

void ts_deflater_free(struct ts_deflater *d)
{
    if (d)
        free(d->level_buf);
    free(d);
}

/* NULL when there is no such level or no memory. */
struct ts_deflater *ts_deflater_new(uint32_t level)
{
    struct ts_deflater *d;

    if (level >= sizeof(level_buf_sizes) / sizeof(level_buf_sizes[0]))
        return NULL;
    d = calloc(1, sizeof(*d));
    if (!d)
        return NULL;
    d->level = level;
    d->level_buf_size = level_buf_sizes[level];
    if (d->level_buf_size) {
        d->level_buf = aligned(d->level_buf_size);
        if (!d->level_buf) {
            free(d);
            return NULL;
        }
    }
    return d;
}

/*
 * Raw deflate of one whole input without any history before it. With `finish` the last block is marked final, else
 * the data ends with a sync flush. Bytes written, or -1 when they do not fit or ISA-L refuses.
 */
int64_t ts_deflate(struct ts_deflater *d, const uint8_t *in, uint32_t in_len, uint8_t *out, uint32_t out_len, int finish)
{
    struct isal_zstream *s = &d->stream;

    isal_deflate_init(s);
    s->level = d->level;
    s->level_buf = d->level_buf;
    s->level_buf_size = d->level_buf_size;
    s->gzip_flag = IGZIP_DEFLATE;
    s->end_of_stream = finish ? 1 : 0;
    s->flush = finish ? NO_FLUSH : SYNC_FLUSH;
    s->next_in = (uint8_t *)in;
    s->avail_in = in_len;
    s->next_out = out;
    s->avail_out = out_len;
    if (isal_deflate(s) != COMP_OK)
        return -1;
    /* An output buffer that is full to the last byte may hide bytes that had no room. */
    if (s->avail_in != 0 || s->avail_out == 0)
        return -1;
    if (finish && s->internal_state.state != ZSTATE_END)
        return -1;
    return (int64_t)(out_len - s->avail_out);
}

struct inflate_state *ts_inflater_new(void)
{
    struct inflate_state *s = malloc(sizeof(*s));

    if (s)
        isal_inflate_init(s);
    return s;
}

void ts_inflater_free(struct inflate_state *s)
{
    free(s);
}

void ts_inflater_reset(struct inflate_state *s)
{
    isal_inflate_reset(s);
}

/*
 * Raw inflate with the history of earlier calls. Returns ISA-L's verdict (0, or negative for bad data); `in_left`
 * and `made` say how far it came.
 */
int ts_inflate(struct inflate_state *s, const uint8_t *in, uint32_t in_len, uint8_t *out, uint32_t out_len,
               uint32_t *in_left, uint32_t *made)
{
    int ret;

    s->next_in = (uint8_t *)in;
    s->avail_in = in_len;
    s->next_out = out;
    s->avail_out = out_len;
    ret = isal_inflate(s);
    *in_left = s->avail_in;
    *made = out_len - s->avail_out;
    s->next_in = NULL;
    s->avail_in = 0;
    s->next_out = NULL;
    s->avail_out = 0;
    return ret;
}

/* Where the last call stopped: 0 between two blocks on a byte boundary, 1 after the final block, 2 anywhere else. */
int ts_inflater_place(const struct inflate_state *s)
{
    int between = s->block_state == ISAL_BLOCK_NEW_HDR || (s->block_state == ISAL_BLOCK_HDR && s->tmp_in_size == 0);

    if (s->tmp_out_valid != s->tmp_out_processed)
        return 2;
    if (s->block_state == ISAL_BLOCK_FINISH || s->block_state == ISAL_BLOCK_INPUT_DONE)
        return s->read_in_length < 8 ? 1 : 2;
    return between && s->read_in_length == 0 && !s->bfinal ? 0 : 2;
}

uint32_t ts_crc32(uint32_t seed, const uint8_t *in, uint64_t len)
{
    return crc32_gzip_refl(seed, in, len);
}
