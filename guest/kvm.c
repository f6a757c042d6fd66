/*
 * A guest that needs no operating system: a 32-bit multiboot program that writes its memory, checks it, and reports.
 * It runs under KVM even where the host's KVM is too restricted for Linux, and starts in a blink.
 *
 * Every page holds a pattern made of its number and its version; the versions are kept in a table elsewhere. A page is
 * checked completely before it is overwritten, so one stale, lost or misplaced page is an error. It says so by serial
 * port in the lines of guest/workload.rs, so that whoever reads them need not care which guest it is.
 *
 * Arguments (-append): workload.mib=N (default: all memory), workload.rate=PAGES_PER_SECOND (0, the default: as fast as
 * possible), workload.idle=1 (write nothing after the first fill), workload.sweep_ms=N (default 1000),
 * workload.report_ms=N (time between two reports, default 200), workload.beat_ms=N (time between two beats, lines of one
 * "~"; 0, the default: none). When a beat comes in is for whoever listens to see: this guest's own clock stands still
 * when the guest does.
 */
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

enum {
    PAGE = 4096,
    WORDS = PAGE / sizeof(u32),
    /* One version a page: 4 MiB are enough for the 4 GiB that 32 bits can address. */
    VERSIONS_AT = 8 << 20,
    PAGES_AT = 16 << 20,
    SERIAL = 0x3f8,
    MAGIC = 0x70696873,
};

/* Version 1 of the multiboot header: align modules, tell the memory size. */
__attribute__((section(".multiboot"), used)) static const u32 header[] = {0x1badb002, 3, -(0x1badb002 + 3)};

/* What the loader tells us; only what is used here. */
struct loader_info {
    u32 flags;
    u32 mem_lower_kib;
    u32 mem_upper_kib; /* from 1 MiB up to the first gap */
    u32 boot_device;
    const char *arguments;
};

/* ebx is the loader's information. The loader gives no stack. */
__asm__(".text\n.globl start\nstart:\n"
        "mov $stack_end, %esp\n"
        "push %ebx\n"
        "call main\n"
        "1: hlt\njmp 1b\n"
        ".bss\n.align 16\n.skip 16384\nstack_end:\n.text\n");

static void out(u32 port, u8 value) { __asm__ volatile("outb %0, %w1" : : "a"(value), "Nd"(port)); }

static u8 in(u32 port)
{
    u8 value;
    __asm__ volatile("inb %w1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

static u64 cycles(void)
{
    u32 low, high;
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    return (u64)high << 32 | low;
}

/* The serial port. */

static void put(char c)
{
    while (!(in(SERIAL + 5) & 0x20)) {
    }
    out(SERIAL, (u8)c);
}

static void put_text(const char *text)
{
    while (*text)
        put(*text++);
}

static void put_number(u32 number)
{
    char digits[10];
    int n = 0;
    do {
        digits[n++] = (char)('0' + number % 10);
        number /= 10;
    } while (number);
    while (n)
        put(digits[--n]);
}

static void put_field(const char *name, u32 number)
{
    put_text(name);
    put_number(number);
}

/* The clock: the processor's counter, measured once against the timer chip. */

static u32 cycles_per_ms;

static void measure_clock(void)
{
    const u32 hz = 1193182, ms = 20, count = hz * ms / 1000;
    out(0x61, (in(0x61) & ~2u) | 1); /* channel 2 counts, the speaker is off */
    out(0x43, 0xb0);                 /* channel 2, count down once */
    out(0x42, count & 0xff);
    u64 start = cycles();
    out(0x42, count >> 8);
    while (!(in(0x61) & 0x20)) {
    }
    cycles_per_ms = (u32)(cycles() - start) / ms;
    if (!cycles_per_ms)
        cycles_per_ms = 1;
}

/* Signed: the counter may stand lower on the host that the guest was moved to. Then the time is taken as come. */
static int reached(u64 *when, u32 next_ms)
{
    long long late = (long long)(cycles() - *when);
    u64 step = (u64)next_ms * cycles_per_ms;
    if (late < 0 && (u64)-late <= step)
        return 0;
    *when = (late < 0 || (u64)late > step ? cycles() : *when) + step;
    return 1;
}

/*
 * Rest: the processor halts until its timer interrupts it: a hundred times a second, or as often as the guest beats, or,
 * when it is idle, as often as it reports. Interrupts are let in only there, so nothing else has to expect them. A guest
 * that polled instead would take a core from whoever looks at it.
 */

enum {
    CODE = 8,
    DATA = 16,
    TIMER = 0x20,
    /* The local APIC, whose clock has nanoseconds in QEMU and in KVM. */
    APIC = 0xfee00000,
    APIC_SPURIOUS = 0xf0,
    APIC_TIMER = 0x320,
    APIC_PERIOD = 0x380,
    APIC_DIVISOR = 0x3e0,
    PERIODIC = 1 << 17,
    NS_PER_MS = 1000 * 1000,
    TICK_MS = 10,
    LONGEST_TICK_MS = 1000,
};

/*
 * The interrupt ends `rest`, wherever in it it comes: it says that it is over, drops what the processor has put on the
 * stack and returns to who rests, with interrupts off. KVM's emulator, where it is needed, knows no iret.
 */
__asm__(".text\nrest:\n"
        "sti\n"
        "hlt\n"
        "tick:\n"
        "movl $0, 0xfee000b0\n"
        "add $12, %esp\n"
        "ret\n");
void rest(void);
extern const u8 tick[];

static const u64 segments[] = {0, 0x00cf9a000000ffff, 0x00cf92000000ffff};
static u64 gates[256];

struct __attribute__((packed)) table {
    unsigned short last;
    const void *at;
};

static void set_apic(u32 place, u32 value) { *(volatile u32 *)(APIC + place) = value; }

static void prepare_rest(u32 tick_ns)
{
    const struct table segment_table = {sizeof segments - 1, segments}, gate_table = {sizeof gates - 1, gates};
    gates[TIMER] = (u64)((u32)tick >> 16) << 48 | 0x00008e0000000000 | CODE << 16 | ((u32)tick & 0xffff);
    __asm__ volatile("lgdt %0\n"
                     "ljmp %2, $1f\n1:\n"
                     "mov %3, %%ds\n mov %3, %%es\n mov %3, %%ss\n"
                     "lidt %1"
                     :
                     : "m"(segment_table), "m"(gate_table), "i"(CODE), "r"(DATA)
                     : "memory");
    /* Nothing from the old controllers. */
    out(0x21, 0xff);
    out(0xa1, 0xff);
    set_apic(APIC_SPURIOUS, 0x1ff);
    set_apic(APIC_DIVISOR, 0xb);
    set_apic(APIC_TIMER, PERIODIC | TIMER);
    set_apic(APIC_PERIOD, tick_ns);
}

/* The arguments. */

static u32 argument(const char *text, const char *name, u32 otherwise)
{
    for (; *text; text++) {
        const char *t = text, *n = name;
        while (*n && *t == *n)
            t++, n++;
        if (*n || *t != '=')
            continue;
        u32 value = 0;
        for (t++; *t >= '0' && *t <= '9'; t++)
            value = value * 10 + (u32)(*t - '0');
        return value;
    }
    return otherwise;
}

/* The pages. */

static volatile u32 *const versions = (volatile u32 *)VERSIONS_AT;
static u32 pages, count, checked, errors, sweeps;

static volatile u32 *page_at(u32 page) { return (volatile u32 *)(PAGES_AT + page * PAGE); }

enum { NAMED = 3 };

/* The first words name the page and its version, so that it can be found in a memory dump. */
static u32 name(u32 page, u32 version, u32 index) { return index == 0 ? MAGIC : index == 1 ? page : version; }

/* All other words are equal: one string instruction writes or checks them, which matters where KVM has to emulate. */
static u32 filler(u32 page, u32 version) { return page * 0x9e3779b9 + version * 0x85ebca6b + 1; }

static void write_page(u32 page, u32 version)
{
    volatile u32 *at = page_at(page);
    for (u32 i = 0; i < NAMED; i++)
        at[i] = name(page, version, i);
    volatile u32 *rest = at + NAMED;
    u32 left = WORDS - NAMED;
    __asm__ volatile("rep stosl" : "+D"(rest), "+c"(left) : "a"(filler(page, version)) : "memory");
    versions[page] = version;
}

static int page_is_right(u32 page, u32 version)
{
    volatile u32 *at = page_at(page);
    for (u32 i = 0; i < NAMED; i++)
        if (at[i] != name(page, version, i))
            return 0;
    volatile u32 *rest = at + NAMED;
    u32 left = WORDS - NAMED;
    u8 equal;
    __asm__ volatile("repe scasl; sete %2"
                     : "+D"(rest), "+c"(left), "=q"(equal)
                     : "a"(filler(page, version))
                     : "memory", "cc");
    return equal;
}

static void check_page(u32 page)
{
    u32 version = versions[page];
    checked++;
    if (page_is_right(page, version))
        return;
    if (errors < 10) {
        put_field("workload: bad page=", page);
        put_field(" version=", version);
        put_field(" found=", page_at(page)[2]);
        put('\n');
    }
    errors++;
    write_page(page, version + 1); /* counted once */
}

static void sweep(int asked)
{
    for (u32 page = 0; page < pages; page++)
        check_page(page);
    put_field("workload: sweep=", ++sweeps);
    put_field(" pages=", pages);
    put_field(" errors=", errors);
    put_text(asked ? " asked\n" : "\n");
}

static void report(u32 uptime_ms)
{
    put_field("workload: count=", count);
    put_field(" checked=", checked);
    put_field(" errors=", errors);
    put_field(" uptime=", uptime_ms / 1000);
    put('\n');
}

/* "check" and a line end: only the end matters, there is no other command. */
static int asked_to_check(void)
{
    int asked = 0;
    while (in(SERIAL + 5) & 1)
        asked |= in(SERIAL) == '\n';
    return asked;
}

void main(const struct loader_info *info);
void main(const struct loader_info *info)
{
    const char *arguments = info->flags & 4 ? info->arguments : "";
    u32 room = (info->mem_upper_kib - ((PAGES_AT - (1 << 20)) >> 10)) / 4;
    pages = argument(arguments, "workload.mib", 0) * 256;
    if (!pages || pages > room)
        pages = room;
    u32 rate = argument(arguments, "workload.rate", 0);
    u32 idle = argument(arguments, "workload.idle", 0);
    u32 sweep_ms = argument(arguments, "workload.sweep_ms", 1000);
    u32 report_ms = argument(arguments, "workload.report_ms", 200);

    u32 beat_ms = argument(arguments, "workload.beat_ms", 0);

    u32 tick_ms = beat_ms && beat_ms < TICK_MS ? beat_ms : TICK_MS;
    if (idle && !beat_ms && report_ms > TICK_MS)
        tick_ms = report_ms < LONGEST_TICK_MS ? report_ms : LONGEST_TICK_MS;
    prepare_rest(tick_ms * NS_PER_MS);
    measure_clock();
    for (u32 page = 0; page < pages; page++)
        write_page(page, 1);
    put_field("workload: ready pages=", pages);
    put('\n');

    u64 next_report = cycles(), next_batch = next_report, next_beat = next_report;
    /* Everything has just been written: there is nothing to check yet. */
    u64 next_sweep = next_report + (u64)sweep_ms * cycles_per_ms;
    u32 page = 0, uptime_ms = 0;
    for (;;) {
        u32 batch = 0;
        if (!idle)
            batch = !rate ? 64 : reached(&next_batch, 10) ? (rate + 99) / 100 : 0;
        if (!batch)
            rest();
        for (; batch; batch--) {
            check_page(page);
            write_page(page, versions[page] + 1);
            count++;
            page = page + 1 == pages ? 0 : page + 1;
        }
        if (beat_ms && reached(&next_beat, beat_ms))
            put_text("~\n");
        if (reached(&next_report, report_ms)) {
            report(uptime_ms);
            uptime_ms += report_ms;
        }
        int asked = asked_to_check();
        if (asked || reached(&next_sweep, sweep_ms))
            sweep(asked);
    }
}
