// Preloaded: the wall clock of a process is ahead by as many seconds as the file CLOCK_STEP says, from the moment
// on at which it says so. As where an administrator sets the clock, monotonic clocks go on as they did.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *ahead;
// Of functions that glibc has twice the newer one is meant.
#define REAL(name) ({ \
    static __typeof__(&name) kept; \
    if (!kept) kept = (__typeof__(&name))dlvsym(RTLD_NEXT, #name, "GLIBC_2.3.2"); \
    if (!kept) kept = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
    kept; \
})

__attribute__((constructor)) static void open_step(void) {
    const char *path = getenv("CLOCK_STEP");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *page = fd < 0 ? MAP_FAILED : mmap(0, sizeof *ahead, PROT_READ, MAP_SHARED, fd, 0);
    if (page != MAP_FAILED) ahead = page;
    if (fd >= 0) close(fd);
}

static int64_t step(clockid_t clock) { return clock == CLOCK_REALTIME && ahead ? *ahead : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = REAL(clock_gettime)(clock, now);
    if (!failed) now->tv_sec += step(clock);
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    int failed = REAL(gettimeofday)(now, zone);
    if (!failed) now->tv_sec += step(CLOCK_REALTIME);
    return failed;
}

time_t time(time_t *kept) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (kept) *kept = now.tv_sec;
    return now.tv_sec;
}

// The kernel's own clock did not step: waits end by it.
static struct timespec by_kernel(clockid_t clock, const struct timespec *until) {
    struct timespec moved = *until;
    moved.tv_sec -= step(clock);
    return moved;
}

int pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *until) {
    struct timespec moved = by_kernel(CLOCK_REALTIME, until);
    return REAL(pthread_cond_timedwait)(c, m, &moved);
}

int pthread_cond_clockwait(pthread_cond_t *c, pthread_mutex_t *m, clockid_t clock, const struct timespec *until) {
    struct timespec moved = by_kernel(clock, until);
    return REAL(pthread_cond_clockwait)(c, m, clock, &moved);
}

int sem_timedwait(sem_t *s, const struct timespec *until) {
    struct timespec moved = by_kernel(CLOCK_REALTIME, until);
    return REAL(sem_timedwait)(s, &moved);
}

int sem_clockwait(sem_t *s, clockid_t clock, const struct timespec *until) {
    struct timespec moved = by_kernel(clock, until);
    return REAL(sem_clockwait)(s, clock, &moved);
}

int pthread_mutex_timedlock(pthread_mutex_t *m, const struct timespec *until) {
    struct timespec moved = by_kernel(CLOCK_REALTIME, until);
    return REAL(pthread_mutex_timedlock)(m, &moved);
}
