//! Timers that wake up once, when it is time.
//!
//! Tokio keeps timers in a wheel of six levels and wakes up at each level on the way: a timer of half a second two or three
//! times. Beside a measurement each of them costs as much as a beat, so the link's timers are the kernel's.

use std::{
    future::{Future, poll_fn},
    io,
    os::fd::{AsFd as _, AsRawFd, RawFd},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use nix::sys::{
    time::TimeSpec,
    timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
};
use quinn::{AsyncTimer, AsyncUdpSocket, Runtime, TokioRuntime};
use tokio::io::{Interest, unix::AsyncFd};

/// Tokio in everything but its timers.
#[derive(Debug)]
pub struct ExactRuntime;

impl Runtime for ExactRuntime {
    fn new_timer(&self, deadline: Instant) -> Pin<Box<dyn AsyncTimer>> {
        // Without a file descriptor to spare it is late by a wake-up or two, and works.
        ExactTimer::new(deadline).map_or_else(|_| TokioRuntime.new_timer(deadline), |t| Box::pin(t) as _)
    }

    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        TokioRuntime.spawn(future);
    }

    fn wrap_udp_socket(&self, socket: std::net::UdpSocket) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        TokioRuntime.wrap_udp_socket(socket)
    }

    fn now(&self) -> Instant {
        TokioRuntime.now()
    }
}

/// Returns when `timer` has come.
pub(super) async fn elapsed(timer: &mut Pin<Box<dyn AsyncTimer>>) {
    poll_fn(|cx| timer.as_mut().poll(cx)).await;
}

/// As Tokio wants to have it.
#[derive(Debug)]
struct Kernels(TimerFd);

impl AsRawFd for Kernels {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

#[derive(Debug)]
struct ExactTimer {
    fd: AsyncFd<Kernels>,
    deadline: Instant,
}

impl ExactTimer {
    fn new(deadline: Instant) -> io::Result<Self> {
        let fd = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC)?;
        set(&fd, deadline)?;
        // SAFETY: the descriptor is the timer's own, which the registration owns: it names the same timer until that ends.
        let fd = unsafe { AsyncFd::register_with_interest(Kernels(fd), Interest::READABLE) }?;
        Ok(Self { fd, deadline })
    }
}

fn set(fd: &TimerFd, deadline: Instant) -> nix::Result<()> {
    // Nothing at all would disarm it.
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
    fd.set(Expiration::OneShot(TimeSpec::from_duration(left)), TimerSetTimeFlags::empty())
}

impl AsyncTimer for ExactTimer {
    fn reset(mut self: Pin<&mut Self>, deadline: Instant) {
        self.deadline = deadline;
        // Only a time that is none could be refused.
        let _ = set(&self.fd.get_ref().0, deadline);
    }

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if Instant::now() >= self.deadline {
                return Poll::Ready(());
            }
            let Ok(mut ready) = ready!(self.fd.poll_read_ready(cx)) else {
                // The runtime ends.
                return Poll::Pending;
            };
            ready.clear_ready();
            // What has come counts once; a deadline that was moved meanwhile comes by itself.
            let _ = self.fd.get_ref().0.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(20);
    const FAR: Duration = Duration::from_hours(1);

    async fn comes(timer: &mut Pin<Box<dyn AsyncTimer>>) {
        tokio::time::timeout(Duration::from_secs(20), elapsed(timer)).await.expect("the timer comes");
    }

    #[tokio::test]
    async fn a_timer_comes_at_its_time_and_not_before_however_it_was_moved() {
        let began = Instant::now();
        let mut timer = ExactRuntime.new_timer(began + SOON);
        comes(&mut timer).await;
        assert!(began.elapsed() >= SOON);
        // Earlier, later, and after it had come.
        for times in [[FAR, SOON], [SOON, SOON * 2]] {
            let began = Instant::now();
            times.iter().for_each(|t| timer.as_mut().reset(began + *t));
            comes(&mut timer).await;
            assert!(began.elapsed() >= times[1], "{times:?} came after {:?}", began.elapsed());
        }
        timer.as_mut().reset(Instant::now() - SOON);
        comes(&mut timer).await;
    }

    /// What nobody polled before it came: its readiness is of the time before it was moved.
    #[tokio::test]
    async fn a_timer_that_came_unseen_and_was_moved_waits_for_its_new_time() {
        let mut timer = ExactRuntime.new_timer(Instant::now() + SOON);
        let mut other = ExactRuntime.new_timer(Instant::now() + SOON * 2);
        comes(&mut other).await;
        let moved = Instant::now() + SOON * 2;
        timer.as_mut().reset(moved);
        comes(&mut timer).await;
        assert!(Instant::now() >= moved);
    }

    #[test]
    fn a_timer_wakes_its_thread_once() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // Voluntary switches of this thread: each is a wait that ended.
        let waits = || nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_THREAD).unwrap();
        let waited = runtime.block_on(async {
            // Whatever a runtime does at its first turn is done.
            comes(&mut ExactRuntime.new_timer(Instant::now() + SOON)).await;
            let before = waits().voluntary_context_switches();
            elapsed(&mut ExactRuntime.new_timer(Instant::now() + Duration::from_millis(600))).await;
            waits().voluntary_context_switches() - before
        });
        assert_eq!(waited, 1);
    }
}
