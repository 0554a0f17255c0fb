package flight

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"golang.org/x/sync/semaphore"
)

func TestWithoutALimitEverybodyHasAPlace(t *testing.T) {
	t.Parallel()
	p := NewPlace(nil)
	for range 2 {
		if !p.Try() {
			t.Error("no place")
		}
	}
	p.Free()
	p.Exempt()
	if !p.Try() {
		t.Error("no place after Free")
	}
}

func TestAPlaceIsTakenOnceAndFreedOnce(t *testing.T) {
	t.Parallel()
	sem := semaphore.NewWeighted(1)
	p, q := NewPlace(sem), NewPlace(sem)
	for range 2 {
		if !p.Try() || q.Try() {
			t.Error("want a place for the first, also when asked again, and none for the second")
		}
	}
	p.Free()
	p.Free()
	if !q.Try() || p.Try() {
		t.Error("want one place after Free, not two")
	}
	q.Free()
}

func TestPlacesAreGivenInOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		sem := semaphore.NewWeighted(1)
		holder := NewPlace(sem)
		holder.Try()
		places := make([]*Place, 10)
		for i := range places {
			places[i] = NewPlace(sem)
			queue := places[i].Queue()
			synctest.Wait()
			if places[i].Queue() != queue {
				t.Error("who queues already queues again")
			}
		}
		for i, p := range places {
			if p.Try() {
				t.Errorf("number %d has a place while another holds it", i)
			}
			holder.Free()
			synctest.Wait()
			for j, other := range places[i:] {
				if granted := len(other.Queue()) == 1; granted != (j == 0) {
					t.Errorf("after %d turns number %d is granted: %t", i, i+j, granted)
				}
			}
			if NewPlace(sem).Try() {
				t.Error("a newcomer overtakes the queue")
			}
			<-p.Queue()
			p.Enter()
			if !p.Try() {
				t.Errorf("number %d has entered and has no place", i)
			}
			holder = p
		}
		holder.Free()
	})
}

func TestWhoLeavesTheQueueLosesNoPlace(t *testing.T) {
	t.Parallel()
	for _, leave := range []string{"before its turn", "when granted and not told", "exempt"} {
		t.Run(leave, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sem := semaphore.NewWeighted(1)
				holder, p, next := NewPlace(sem), NewPlace(sem), NewPlace(sem)
				holder.Try()
				p.Queue()
				synctest.Wait()
				next.Queue()
				synctest.Wait()
				switch leave {
				case "before its turn":
					p.Free()
					holder.Free()
				case "when granted and not told":
					holder.Free()
					synctest.Wait()
					p.Free()
				case "exempt":
					p.Exempt()
					if !p.Try() {
						t.Error("who is exempt needs no place")
					}
					holder.Free()
				}
				if !<-next.Queue() {
					t.Error("the next one is refused")
				}
				next.Enter()
				next.Free()
				if !sem.TryAcquire(1) {
					t.Error("the place is lost")
				}
				if sem.TryAcquire(1) {
					t.Error("there are two places now")
				}
			})
		})
	}
}

func TestWhoIsGrantedAPlaceTakesNoSecondOne(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		sem := semaphore.NewWeighted(2)
		one, two, p := NewPlace(sem), NewPlace(sem), NewPlace(sem)
		one.Try()
		two.Try()
		p.Queue()
		synctest.Wait()
		one.Free()
		synctest.Wait() // granted, and p has not been told
		two.Free()
		p.Try()
		p.Free()
		if !sem.TryAcquire(2) {
			t.Error("a place is lost")
		}
	})
}

func TestWhoIsExemptGivesItsPlaceBack(t *testing.T) {
	t.Parallel()
	sem := semaphore.NewWeighted(1)
	p := NewPlace(sem)
	p.Try()
	p.Exempt()
	if !sem.TryAcquire(1) {
		t.Error("the place is still held")
	}
	if !p.Try() {
		t.Error("who is exempt needs no place")
	}
	p.Free()
	if sem.TryAcquire(1) {
		t.Error("who is exempt has freed a place of another")
	}
}

func TestNoPlaceIsEverLost(t *testing.T) {
	t.Parallel()
	const limit = 3
	sem := semaphore.NewWeighted(limit)
	var held atomic.Int64
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			for n := range 500 {
				p := NewPlace(sem)
				if !p.Try() {
					queue := p.Queue()
					if (i+n)%3 == 0 {
						p.Free() // perhaps just granted
						continue
					}
					<-queue
					p.Enter()
				}
				if h := held.Add(1); h > limit {
					t.Errorf("%d places held of %d", h, limit)
				}
				held.Add(-1)
				p.Free()
			}
		})
	}
	wg.Wait()
	if err := sem.Acquire(context.Background(), limit); err != nil {
		t.Error(err)
	}
	if sem.TryAcquire(1) {
		t.Error("more places than at the beginning")
	}
}
