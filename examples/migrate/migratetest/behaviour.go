package migratetest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"

	"github.com/singlefill/singlefill/examples/migrate/users"
)

// A Behaviour is what a cache does in situations in which the libraries differ. The table of
// docs/migrate/README.md lists it for each of them.
type Behaviour struct {
	TwoProcesses    int    // reads of the source if two processes miss at the same time
	DeleteInLoad    string // the name after a Rename from Ada to Grace while a load has read Ada
	CallerCancelled int    // reads by two calls, of which the first is cancelled during its load
	FailedLoad      int    // reads if a load fails for which another process waits
	NotFound        int    // reads by two calls for a user that does not exist
	RedisDown       bool   // a call gets its value without Redis
	Panic           bool   // a panic of the load is a panic of the caller, not an error
}

// ours is the behaviour of singlefill.
var ours = Behaviour{
	TwoProcesses:    1,
	DeleteInLoad:    "Grace",
	CallerCancelled: 1,
	FailedLoad:      1,
	NotFound:        1,
	RedisDown:       true,
}

// An Open opens a cache of db, as a process of its own would have it.
type Open func(t *testing.T, rdb *redis.Client, db *users.DB) users.Cache

// Waits reports whether a process waits for the load of another one, by the commands that the server
// has executed for both, and those that were answered for the one that waits, if it has a client of
// go-redis.
type Waits func(s *redistest.Server, answered func(name string) int64) bool

// oursWaits is the Waits of singlefill: the lock has been asked for and its holder is known.
func oursWaits(_ *redistest.Server, answered func(name string) int64) bool {
	return answered("eval")+answered("evalsha") > 0
}

// Want checks the behaviour of both caches: that of the old one is want. waits is nil if no process
// waits for the load of another one.
func Want(t *testing.T, before, after Open, want Behaviour, waits Waits) {
	t.Run("before", func(t *testing.T) { wantOne(t, before, want, waits) })
	t.Run("after", func(t *testing.T) { wantOne(t, after, ours, oursWaits) })
}

// wantOne checks each part of a Behaviour on a server of its own.
func wantOne(t *testing.T, open Open, want Behaviour, waits Waits) {
	t.Run("TwoProcesses", func(t *testing.T) { t.Parallel(); twoProcesses(t, open, want.TwoProcesses) })
	t.Run("DeleteInLoad", func(t *testing.T) { t.Parallel(); deleteInLoad(t, open, want.DeleteInLoad) })
	t.Run("CallerCancelled", func(t *testing.T) { t.Parallel(); callerCancelled(t, open, want.CallerCancelled) })
	t.Run("FailedLoad", func(t *testing.T) { t.Parallel(); failedLoad(t, open, want.FailedLoad, waits) })
	t.Run("NotFound", func(t *testing.T) { t.Parallel(); notFound(t, open, want.NotFound) })
	t.Run("RedisDown", func(t *testing.T) { t.Parallel(); redisDown(t, open, want.RedisDown) })
	t.Run("Panic", func(t *testing.T) { t.Parallel(); panics(t, open, want.Panic) })
}

func twoProcesses(t *testing.T, open Open, want int) {
	s, db, ctx := redistest.Start(t), NewDB(t), Context(t)
	first, second := open(t, s.Client(t), db), open(t, s.Client(t), db)
	held, release := db.HoldNext()
	defer release()
	calls := []*Call{Go(ctx, first)}
	<-held
	calls = append(calls, Go(ctx, second))
	if want > 1 {
		redistest.Await(t, "a read of the second process", func() bool { return db.Reads() == want })
	}
	release()
	for _, call := range calls {
		if user, err := call.Wait(t); err != nil || user.Name != "Ada" {
			t.Errorf("User = %v, %v, want Ada", user, err)
		}
	}
	WantReads(t, db, want)
}

func deleteInLoad(t *testing.T, open Open, want string) {
	s, db, ctx := redistest.Start(t), NewDB(t), Context(t)
	c := open(t, s.Client(t), db)
	held, release := db.HoldNext()
	defer release()
	late := Go(ctx, c)
	<-held
	redistest.Must(t, users.Rename(ctx, db, "42", "Grace", c))
	release()
	_, err := late.Wait(t)
	redistest.Must(t, err)
	WantName(t, c, want)
}

func callerCancelled(t *testing.T, open Open, want int) {
	s, db := redistest.Start(t), NewDB(t)
	c := open(t, s.Client(t), db)
	held, release := db.HoldNext()
	defer release()
	ctx, cancel := context.WithCancel(Context(t))
	defer cancel()
	first := Go(ctx, c)
	<-held
	cancel()
	if _, err := first.Wait(t); !errors.Is(err, context.Canceled) {
		t.Errorf("User = %v, want context.Canceled", err)
	}
	release()
	WantName(t, c, "Ada")
	WantReads(t, db, want)
}

func failedLoad(t *testing.T, open Open, want int, waits Waits) {
	s, db, ctx := redistest.Start(t), NewDB(t), Context(t)
	down := errors.New("the database is down")
	held, fail := make(chan struct{}), make(chan struct{})
	db.OnNext(func(context.Context) error {
		close(held)
		<-fail
		return down
	})
	rdb := s.Client(t)
	answered := count(rdb)
	first, second := open(t, s.Client(t), db), open(t, rdb, db)
	failing := Go(ctx, first)
	<-held
	waiting := Go(ctx, second)
	if waits == nil {
		redistest.Await(t, "a read of the second process", func() bool { return db.Reads() == want })
	} else {
		redistest.Await(t, "a wait of the second process", func() bool { return waits(s, answered) })
	}
	close(fail)
	if _, err := failing.Wait(t); !errors.Is(err, down) {
		t.Errorf("User = %v, want the error of the database", err)
	}
	user, err := waiting.Wait(t)
	var remote *singlefill.RemoteError
	if want == 1 && !errors.As(err, &remote) {
		t.Errorf("the other process got %v, %v, want the failure", user, err)
	}
	if want == 2 && (err != nil || user.Name != "Ada") {
		t.Errorf("the other process got %v, %v, want Ada by a load of its own", user, err)
	}
	WantReads(t, db, want)
}

func notFound(t *testing.T, open Open, want int) {
	s, db := redistest.Start(t), new(users.DB)
	c := open(t, s.Client(t), db)
	for range 2 {
		if _, err := c.User(Context(t), "42"); !errors.Is(err, users.ErrNoUser) {
			t.Errorf("User = %v, want ErrNoUser", err)
		}
	}
	WantReads(t, db, want)
}

func redisDown(t *testing.T, open Open, want bool) {
	s, db := redistest.Start(t), NewDB(t)
	c := open(t, s.Client(t, redistest.NoRetry), db)
	_, err := c.User(Context(t), "another")
	if err != nil && !errors.Is(err, users.ErrNoUser) {
		t.Fatal(err)
	}
	s.Kill()
	ctx, cancel := context.WithTimeout(Context(t), 5*time.Second)
	defer cancel()
	user, err := c.User(ctx, "42")
	if served := err == nil && user.Name == "Ada"; served != want {
		t.Errorf("without Redis User = %v, %v, served: want %v", user, err, want)
	}
}

func panics(t *testing.T, open Open, want bool) {
	s, db := redistest.Start(t), NewDB(t)
	c := open(t, s.Client(t), db)
	db.OnNext(func(context.Context) error { panic("a bug") })
	_, err := Go(Context(t), c).Wait(t)
	var panicked *Panicked
	if errors.As(err, &panicked) != want {
		t.Errorf("User = %v, a panic of the caller: want %v", err, want)
	}
	var asError *singlefill.PanicError
	if errors.As(err, &asError) == want {
		t.Errorf("User = %v, a *PanicError: want %v", err, !want)
	}
}
