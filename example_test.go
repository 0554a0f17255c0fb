package singlefill_test

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/maypok86/otter/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
)

// embeddedRedis returns a client of an embedded server, so that the examples run anywhere.
func embeddedRedis() (rdb *redis.Client, stop func()) {
	mini, err := miniredis.Run()
	if err != nil {
		panic(err)
	}
	mini.ClockTTL(true) // or nothing would ever expire
	rdb = redis.NewClient(&redis.Options{Addr: mini.Addr()})
	return rdb, func() { rdb.Close(); mini.Close() }
}

// embeddedCache returns a cache on an embedded server, so that the examples run anywhere. A service
// makes one client of its Redis, and a cache per namespace.
func embeddedCache[T any](namespace string, ttl time.Duration,
	opts *singlefill.Options[T]) (c *singlefill.Cache[T], stop func()) {
	rdb, stopRedis := embeddedRedis()
	c = newCache(rdb, namespace, ttl, opts)
	return c, func() { c.Close(); stopRedis() }
}

// newCache is singlefill.New for options that are known to be right.
func newCache[T any](rdb *redis.Client, namespace string, ttl time.Duration, opts *singlefill.Options[T]) *singlefill.Cache[T] {
	c, err := singlefill.New(rdb, namespace, ttl, opts)
	if err != nil {
		panic(err)
	}
	return c
}

// A key is loaded once, however many callers ask for it at the same time, in however many processes.
func Example() {
	rdb, stop := embeddedRedis()
	defer stop()

	type User struct{ Name string }
	users, err := singlefill.New[User](rdb, "users", 5*time.Minute, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer users.Close()

	var loads, failures atomic.Int64
	loadUser := func(ctx context.Context, id string) (User, error) {
		loads.Add(1)
		time.Sleep(50 * time.Millisecond) // a slow query
		return User{Name: "user " + id}, nil
	}

	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			user, err := users.GetOrLoad(context.Background(), "42", loadUser)
			if err != nil || user.Name != "user 42" {
				failures.Add(1)
			}
		})
	}
	wg.Wait()
	fmt.Println("loads:", loads.Load(), "failures:", failures.Load())
	// Output: loads: 1 failures: 0
}

// A program in which Redis is optional has one path. One line says where the values are.
func ExampleNewLocal() {
	type User struct{ Name string }
	newUsers := func(rdb redis.UniversalClient) (*singlefill.Cache[User], error) {
		opts := &singlefill.Options[User]{StaleIfError: time.Hour}
		if rdb == nil {
			return singlefill.NewLocal("users", 5*time.Minute, opts)
		}
		return singlefill.New(rdb, "users", 5*time.Minute, opts)
	}
	run := func(rdb redis.UniversalClient) {
		users, err := newUsers(rdb)
		if err != nil {
			fmt.Println(err)
			return
		}
		defer users.Close()
		ctx := context.Background()
		loadUser := func(_ context.Context, id string) (User, error) {
			fmt.Println("a slow query for", id)
			return User{Name: "user " + id}, nil
		}
		for range 2 {
			fmt.Println(users.GetOrLoad(ctx, "42", loadUser))
		}
		fmt.Println(users.Delete(ctx, "42"))
	}
	run(nil)
	rdb, stop := embeddedRedis()
	defer stop()
	run(rdb)
	// Output:
	// a slow query for 42
	// {user 42} <nil>
	// {user 42} <nil>
	// <nil>
	// a slow query for 42
	// {user 42} <nil>
	// {user 42} <nil>
	// <nil>
}

// A cache is flushed since a page has changed, while the old page is being made. A map and a cache with a loader
// store that page after the flush, and serve it from then on.
func ExampleNewLocal_flushDuringLoad() {
	// during gets a page, which changes while it is made, and then calls flush.
	during := func(get func(ctx context.Context, key string, load func(context.Context, string) (string, error)) (string, error), flush func()) {
		ctx, page, making, goOn := context.Background(), "old page", make(chan struct{}), make(chan struct{})
		made := make(chan struct{})
		go func() {
			defer close(made)
			_, _ = get(ctx, "/", func(context.Context, string) (string, error) {
				old := page
				close(making)
				<-goOn
				return old, nil
			})
		}()
		<-making
		page = "new page"
		flush()
		close(goOn)
		<-made
		fmt.Println(get(ctx, "/", func(context.Context, string) (string, error) { return page, nil }))
	}

	var mu sync.Mutex
	pages := make(map[string]string)
	during(func(ctx context.Context, key string, load func(context.Context, string) (string, error)) (string, error) {
		mu.Lock()
		page, ok := pages[key]
		mu.Unlock()
		if ok {
			return page, nil
		}
		page, err := load(ctx, key) // not under the mutex, or all pages would wait for this one
		mu.Lock()
		defer mu.Unlock()
		pages[key] = page
		return page, err
	}, func() {
		mu.Lock()
		defer mu.Unlock()
		clear(pages)
	})

	lru := otter.Must(&otter.Options[string, string]{MaximumSize: 10_000})
	during(func(ctx context.Context, key string, load func(context.Context, string) (string, error)) (string, error) {
		return lru.Get(ctx, key, otter.LoaderFunc[string, string](load))
	}, lru.InvalidateAll)

	local, err := singlefill.NewLocal[string]("pages", time.Minute, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer local.Close()
	during(func(ctx context.Context, key string, load func(context.Context, string) (string, error)) (string, error) {
		return local.GetOrLoad(ctx, key, load)
	}, func() { _ = local.Clear(context.Background()) })
	// Output:
	// old page <nil>
	// old page <nil>
	// new page <nil>
}

// These options keep a request from waiting long for a server that is down. New sends no command. Its
// errors say what is wrong with an argument, and what is allowed.
func ExampleNew() {
	rdb := redis.NewClient(&redis.Options{
		Addr:                  "127.0.0.1:6379",
		ContextTimeoutEnabled: true, // a deadline also ends the wait for a reply, and hits are cheaper
		DialTimeout:           500 * time.Millisecond,
		MaxRetries:            1, // a connection may have broken while it was idle
		DialerRetries:         1,
	})
	defer rdb.Close()
	users, err := singlefill.New[string](rdb, "users", 5*time.Minute, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer users.Close()

	_, err = singlefill.New(rdb, "prices", time.Minute, &singlefill.Options[int]{Jitter: 2})
	fmt.Println(err)
	// Output: singlefill: Options.Jitter is 2: a fraction below 1 is allowed, or a negative number for none
}

// A process that ends leaves a load that takes too long to another process.
func ExampleCache_Shutdown() {
	reports, stop := embeddedCache[string]("reports", time.Hour, nil)
	defer stop()

	begun, ended := make(chan struct{}), make(chan error)
	go func() {
		_, err := reports.GetOrLoad(context.Background(), "2030-01", func(ctx context.Context, month string) (string, error) {
			close(begun)
			<-ctx.Done() // of a query that takes hours
			return "", ctx.Err()
		})
		ended <- err
	}()
	<-begun
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond) // 20 s in a service
	defer cancel()
	fmt.Println(reports.Shutdown(ctx))
	fmt.Println(<-ended)
	// Output:
	// context deadline exceeded
	// singlefill: cache is closed
}

// A load goes on when the request that started it has ended. Close waits until the load has been
// stored for the next process. Close the server first, then the cache, then the client.
func ExampleCache_Close() {
	rdb, stop := embeddedRedis()
	defer stop()
	reports := newCache[string](rdb, "reports", time.Hour, nil)

	ctx, leave := context.WithCancel(context.Background())
	left := make(chan struct{})
	_, err := reports.GetOrLoad(ctx, "2030-01", func(ctx context.Context, month string) (string, error) {
		leave()
		<-left
		return "all is well", ctx.Err()
	})
	fmt.Println(err)
	close(left)
	reports.Close()

	next := newCache[string](rdb, "reports", time.Hour, nil) // the next process
	defer next.Close()
	fmt.Println(next.Get(context.Background(), "2030-01"))
	// Output:
	// context canceled
	// all is well <nil>
}

// The second call is a hit. An error of the Loader comes back unchanged and is not remembered.
func ExampleCache_GetOrLoad() {
	prices, stop := embeddedCache[int]("prices", time.Minute, nil)
	defer stop()

	errDown := errors.New("price service is down")
	down := true
	load := func(ctx context.Context, item string) (int, error) {
		fmt.Println("asking for the price of", item)
		if down {
			return 0, errDown
		}
		return 7, nil
	}

	ctx := context.Background()
	_, err := prices.GetOrLoad(ctx, "tea", load)
	fmt.Println(err, err == errDown)
	down = false
	for range 2 {
		price, err := prices.GetOrLoad(ctx, "tea", load)
		fmt.Println(price, err)
	}
	// Output:
	// asking for the price of tea
	// price service is down true
	// asking for the price of tea
	// 7 <nil>
	// 7 <nil>
}

// A page that shows a price may have to say that the price is stale.
func ExampleCache_GetOrLoadInfo() {
	prices, stop := embeddedCache("prices", time.Minute, &singlefill.Options[int]{StaleIfError: time.Hour})
	defer stop()

	var down error
	load := func(ctx context.Context, item string) (int, error) { return 7, down }
	show := func() {
		price, info, err := prices.GetOrLoadInfo(context.Background(), "tea", load)
		switch {
		case err != nil:
			fmt.Println("no price:", err)
		case info.Stale:
			fmt.Printf("%d, %v old: %v\n", price, info.Age.Round(time.Minute), info.Err)
		default:
			fmt.Println(price)
		}
	}
	show()
	down = errors.New("price service is down")
	if err := prices.Expire(context.Background(), "tea"); err != nil { // as if the minute were over
		fmt.Println(err)
	}
	show()
	// Output:
	// 7
	// 7, 0s old: price service is down
}

// The loader gets the keys that are missing. A key that it leaves out does not exist.
func ExampleCache_GetOrLoadMany() {
	prices, stop := embeddedCache[int]("prices", time.Minute, nil)
	defer stop()

	shop := map[string]int{"tea": 7, "coffee": 9, "milk": 2}
	load := func(ctx context.Context, items []string) (map[string]int, error) {
		fmt.Println("asking for the prices of", len(items), "items")
		found := make(map[string]int)
		for _, item := range items {
			if price, ok := shop[item]; ok {
				found[item] = price
			}
		}
		return found, nil
	}

	ctx := context.Background()
	for _, page := range [][]string{{"tea", "coffee", "gold"}, {"tea", "gold", "milk"}, {"tea", "coffee", "milk"}} {
		found, err := prices.GetOrLoadMany(ctx, page, load)
		fmt.Println(found, err)
	}
	// Output:
	// asking for the prices of 3 items
	// map[coffee:9 tea:7] <nil>
	// asking for the prices of 1 items
	// map[milk:2 tea:7] <nil>
	// map[coffee:9 milk:2 tea:7] <nil>
}

// A ManyLoader that asks another cache returns errors for its own keys: the other cache has errors for organisations.
func ExampleManyError() {
	rdb, stop := embeddedRedis()
	defer stop()
	orgs, users := newCache[string](rdb, "orgs", time.Hour, nil), newCache[string](rdb, "users", time.Hour, nil)
	defer orgs.Close()
	defer users.Close()

	loadOrgs := func(_ context.Context, ids []string) (map[string]string, error) {
		failed := &singlefill.ManyError{Errs: map[string]error{"2": errors.New("organisation 2: access denied")}}
		return map[string]string{"1": "Acme", "3": "Initech"}, failed
	}
	orgOf := map[string]string{"ann": "1", "bob": "2", "eve": "3"}
	loadUsers := func(ctx context.Context, ids []string) (map[string]string, error) {
		names, err := orgs.GetOrLoadMany(ctx, []string{"1", "2", "3"}, loadOrgs)
		failed := new(singlefill.ManyError) // by organisation
		if err != nil && !errors.As(err, &failed) {
			return nil, err
		}
		found, failures := make(map[string]string), make(map[string]error)
		for _, id := range ids {
			if name, ok := names[orgOf[id]]; ok {
				found[id] = id + " of " + name
			} else if err := failed.Errs[orgOf[id]]; err != nil {
				failures[id] = err
			}
		}
		return found, &singlefill.ManyError{Errs: failures} // none, if there are no failures
	}
	found, err := users.GetOrLoadMany(context.Background(), []string{"ann", "bob", "eve"}, loadUsers)
	fmt.Println(found)
	fmt.Println(err)
	// Output:
	// map[ann:ann of Acme eve:eve of Initech]
	// singlefill: 1 key has an error: organisation 2: access denied
}

// GetMany reads the cache only. What it leaves out, the source may have.
func ExampleCache_GetMany() {
	prices, stop := embeddedCache[int]("prices", time.Minute, nil)
	defer stop()

	ctx := context.Background()
	if err := prices.SetMany(ctx, map[string]int{"tea": 7, "coffee": 9}); err != nil {
		fmt.Println(err)
	}
	fmt.Println(prices.GetMany(ctx, []string{"tea", "coffee", "milk"}))
	// Output: map[coffee:9 tea:7] <nil>
}

// SetMany stores values that are known. Those that it could not store are in a ManyError.
func ExampleCache_SetMany() {
	prices, stop := embeddedCache[int]("prices", time.Minute, nil)
	defer stop()

	ctx := context.Background()
	err := prices.SetMany(ctx, map[string]int{"tea": 7, "coffee": 9})
	var many *singlefill.ManyError
	if errors.As(err, &many) {
		for item, err := range many.Errs {
			fmt.Println(item, "may have its old price for up to a minute:", err)
		}
	}
	fmt.Println(prices.Get(ctx, "coffee"))
	// Output: 9 <nil>
}

// RefreshMany loads what has been loaded before, as a nightly job does. What fails keeps its old value.
func ExampleCache_RefreshMany() {
	prices, stop := embeddedCache[int]("prices", time.Hour, nil)
	defer stop()

	ctx := context.Background()
	items := []string{"tea", "coffee"}
	price := 7
	load := func(ctx context.Context, items []string) (map[string]int, error) {
		found := make(map[string]int)
		for _, item := range items {
			found[item] = price
		}
		return found, nil
	}
	fmt.Println(prices.GetOrLoadMany(ctx, items, load))
	price = 8
	fmt.Println(prices.RefreshMany(ctx, items, load))
	fmt.Println(prices.GetMany(ctx, items))
	// Output:
	// map[coffee:7 tea:7] <nil>
	// <nil>
	// map[coffee:8 tea:8] <nil>
}

// Get reads the cache only. ErrMiss says nothing about the source; ErrNotFound does.
func ExampleCache_Get() {
	names, stop := embeddedCache[string]("names", time.Hour, nil)
	defer stop()

	ctx := context.Background()
	look := func(id string) {
		name, err := names.Get(ctx, id)
		switch {
		case err == nil:
			fmt.Println(id, "is", name)
		case errors.Is(err, singlefill.ErrMiss):
			fmt.Println(id, "may or may not exist")
		case errors.Is(err, singlefill.ErrNotFound):
			fmt.Println(id, "does not exist")
		default:
			fmt.Println("Redis cannot be asked:", err)
		}
	}
	look("42")
	if err := names.Set(ctx, "42", "Ada"); err != nil {
		fmt.Println(err)
	}
	look("42")
	_, _ = names.GetOrLoad(ctx, "43", func(ctx context.Context, id string) (string, error) { return "", singlefill.ErrNotFound })
	look("43")
	// Output:
	// 42 may or may not exist
	// 42 is Ada
	// 43 does not exist
}

// Set stores a value that the program has at hand, and supersedes a load that may have an older one.
func ExampleCache_Set() {
	names, stop := embeddedCache[string]("names", time.Hour, nil)
	defer stop()

	ctx := context.Background()
	if err := names.Set(ctx, "42", "Ada"); err != nil { // the name that has just been written to the source
		fmt.Println("an old name may be served for up to an hour:", err)
	}
	fmt.Println(names.Get(ctx, "42"))
	// Output: Ada <nil>
}

// After a change of the source, delete the key. A load that began before is not stored.
func ExampleCache_Delete() {
	names, stop := embeddedCache[string]("names", time.Hour, nil)
	defer stop()

	table := map[string]string{"42": "Ada"}
	load := func(ctx context.Context, id string) (string, error) { return table[id], nil }

	ctx := context.Background()
	fmt.Println(names.GetOrLoad(ctx, "42", load))
	table["42"] = "Grace"
	if err := names.Delete(ctx, "42"); err != nil {
		fmt.Println("the old name may be served for up to an hour:", err)
		return
	}
	fmt.Println(names.GetOrLoad(ctx, "42", load))
	// Output:
	// Ada <nil>
	// Grace <nil>
}

// A token that proves to be revoked is replaced once, however many requests have seen it.
func ExampleCache_DeleteIf() {
	tokens, stop := embeddedCache[string]("tokens", time.Hour, nil)
	defer stop()

	ctx := context.Background()
	issued := 0
	load := func(ctx context.Context, user string) (string, error) {
		issued++
		return fmt.Sprint("token ", issued), nil
	}
	refused, info, err := tokens.GetOrLoadInfo(ctx, "ada", load)
	if err != nil {
		fmt.Println(err)
		return
	}
	for range 3 { // requests whose call with the token was refused
		deleted, err := tokens.DeleteIf(ctx, "ada", info)
		if err != nil {
			fmt.Println(refused, "may be in the cache for up to an hour:", err)
		}
		token, err := tokens.GetOrLoad(ctx, "ada", load)
		fmt.Println(deleted, token, err)
	}
	// Output:
	// true token 2 <nil>
	// false token 2 <nil>
	// false token 2 <nil>
}

// Refresh replaces a value that is fresh, at once. If the load fails, the old value stays.
func ExampleCache_Refresh() {
	prices, stop := embeddedCache[int]("prices", time.Hour, nil)
	defer stop()

	ctx := context.Background()
	price, down := 6, error(nil)
	load := func(ctx context.Context, item string) (int, error) {
		price++
		return price, down
	}
	fmt.Println(prices.GetOrLoad(ctx, "tea", load))
	fmt.Println(prices.Refresh(ctx, "tea", load))
	fmt.Println(prices.GetOrLoad(ctx, "tea", load)) // a hit
	down = errors.New("price service is down")
	fmt.Println(prices.Refresh(ctx, "tea", load))
	fmt.Println(prices.GetOrLoad(ctx, "tea", load))
	// Output:
	// 7 <nil>
	// <nil>
	// 8 <nil>
	// price service is down
	// 8 <nil>
}

// After a new price list, the old prices are served while each of them is refreshed once.
func ExampleCache_Expire() {
	prices, stop := embeddedCache("prices", time.Hour, &singlefill.Options[int]{StaleWhileRevalidate: time.Minute})
	defer stop()

	ctx := context.Background()
	price := 7
	load := func(ctx context.Context, item string) (int, error) { return price, nil }
	fmt.Println(prices.GetOrLoad(ctx, "tea", load))
	price = 8
	if err := prices.Expire(ctx, "tea", "coffee"); err != nil {
		fmt.Println("the old prices may be served for up to an hour:", err)
		return
	}
	old, info, err := prices.GetOrLoadInfo(ctx, "tea", load)
	fmt.Println(old, err, "stale:", info.Stale)
	// Output:
	// 7 <nil>
	// 7 <nil> stale: true
}

// After an import everything may have changed.
func ExampleCache_Clear() {
	prices, stop := embeddedCache[int]("prices", time.Hour, nil)
	defer stop()

	ctx := context.Background()
	if err := prices.SetMany(ctx, map[string]int{"tea": 7, "coffee": 9}); err != nil {
		fmt.Println(err)
	}
	if err := prices.Clear(ctx); err != nil {
		fmt.Println("old prices may be left; Clear again:", err)
	}
	fmt.Println(prices.GetMany(ctx, []string{"tea", "coffee"}))
	// Output: map[] <nil>
}

// A program that starts looks for what its Redis user may not do. It works without, so this is no reason to stop.
func ExampleCache_Check() {
	names, stop := embeddedCache[string]("names", time.Hour, nil)
	defer stop()

	if err := names.Check(context.Background()); err != nil {
		fmt.Println("the cache will not do all of its work:", err)
	} else {
		fmt.Println("Redis refuses nothing")
	}
	// Output: Redis refuses nothing
}

func ExampleCache_Stats() {
	names, stop := embeddedCache[string]("names", time.Hour, nil)
	defer stop()

	load := func(ctx context.Context, id string) (string, error) { return "Ada", nil }
	for range 3 {
		if _, err := names.GetOrLoad(context.Background(), "42", load); err != nil {
			fmt.Println(err)
		}
	}
	s := names.Stats()
	fmt.Println(s.Misses, "miss,", s.Loads, "load,", s.Hits, "hits")
	// Output: 1 miss, 1 load, 2 hits
}

// AddTrace adds functions to Options.Trace, as metrics and spans do.
func ExampleCache_AddTrace() {
	names, stop := embeddedCache[string]("names", time.Hour, nil)
	defer stop()

	names.AddTrace(&singlefill.Trace{
		Hit:  func(ctx context.Context, key string) { fmt.Println("hit:", key) },
		Miss: func(ctx context.Context, key string) { fmt.Println("miss:", key) },
	})
	load := func(ctx context.Context, id string) (string, error) { return "Ada", nil }
	for range 2 {
		fmt.Println(names.GetOrLoad(context.Background(), "42", load))
	}
	// Output:
	// miss: 42
	// Ada <nil>
	// hit: 42
	// Ada <nil>
}

func ExampleCache_DeleteTag() {
	type order struct{ Item, Country string }
	orders, stop := embeddedCache("orders", time.Hour, &singlefill.Options[order]{
		Tags: func(id string, o order) []string { return []string{"item:" + o.Item, "country:" + o.Country} },
	})
	defer stop()

	ctx := context.Background()
	load := func(ctx context.Context, id string) (order, error) {
		fmt.Println("load", id)
		return map[string]order{"1": {"tea", "in"}, "2": {"tea", "lk"}, "3": {"coffee", "br"}}[id], nil
	}
	get := func() {
		for _, id := range []string{"1", "2", "3"} {
			if _, err := orders.GetOrLoad(ctx, id, load); err != nil {
				fmt.Println(err)
			}
		}
	}
	get()
	for range 2 {
		if err := orders.DeleteTag(ctx, "country:lk"); err != nil {
			fmt.Println("old orders may be served for up to an hour:", err)
		}
		fmt.Println("all values were read:", orders.Stats().TagRebuilds, "times") // by the first DeleteTag
		get()
	}
	// Output:
	// load 1
	// load 2
	// load 3
	// all values were read: 1 times
	// load 2
	// all values were read: 1 times
	// load 2
}

// ExpireTag makes the values with a tag stale: they are served while each of them is refreshed once.
func ExampleCache_ExpireTag() {
	pages, stop := embeddedCache("pages", time.Hour, &singlefill.Options[string]{
		Tags:                 func(path, page string) []string { return []string{"menu"} },
		StaleWhileRevalidate: time.Minute,
	})
	defer stop()

	ctx := context.Background()
	menu := "tea"
	load := func(ctx context.Context, path string) (string, error) { return "we have " + menu, nil }
	fmt.Println(pages.GetOrLoad(ctx, "/about", load))
	menu = "tea, coffee"
	if err := pages.ExpireTag(ctx, "menu"); err != nil {
		fmt.Println("pages may have the old menu for up to an hour:", err)
	}
	page, info, err := pages.GetOrLoadInfo(ctx, "/about", load)
	fmt.Println(page, err, "stale:", info.Stale)
	// Output:
	// we have tea <nil>
	// we have tea <nil> stale: true
}

// Values in the memory of a process are at most MaxLag behind a Delete of another process.
func ExampleNear() {
	rdb, stop := embeddedRedis()
	defer stop()
	opts := &singlefill.Options[string]{Near: &singlefill.Near{Size: 50_000, MaxLag: 100 * time.Millisecond}}
	here := newCache(rdb, "names", time.Hour, opts) // each process has one
	defer here.Close()
	there := newCache(rdb, "names", time.Hour, opts)
	defer there.Close()

	ctx := context.Background()
	name := "Ada"
	load := func(ctx context.Context, id string) (string, error) { return name, nil }
	for here.Stats().NearHits == 0 { // until memory answers
		if _, err := here.GetOrLoad(ctx, "42", load); err != nil {
			fmt.Println(err)
		}
	}
	name = "Grace"
	if err := there.Delete(ctx, "42"); err != nil {
		fmt.Println("the old name may be served for up to an hour:", err)
	}
	time.Sleep(100 * time.Millisecond)
	fmt.Println(here.GetOrLoad(ctx, "42", load))
	// Output: Grace <nil>
}

// The refreshes of several calls become one query.
func ExampleOptions_loadMany() {
	refreshed := make(chan string)
	prices, stop := embeddedCache("prices", time.Minute, &singlefill.Options[int]{
		StaleWhileRevalidate: time.Hour,
		LoadMany: func(ctx context.Context, items []string) (map[string]int, error) {
			found := make(map[string]int)
			for _, item := range items {
				found[item] = 8
				refreshed <- item
			}
			return found, nil
		},
	})
	defer stop()

	ctx := context.Background()
	items := []string{"coffee", "tea"}
	err := prices.SetMany(ctx, map[string]int{"coffee": 7, "tea": 7})
	if err := errors.Join(err, prices.Expire(ctx, items...)); err != nil { // as if the minute were over
		fmt.Println(err)
		return
	}
	load := func(ctx context.Context, item string) (int, error) { return 9, nil } // not called: there is an old price
	for _, item := range items {
		fmt.Println(prices.GetOrLoad(ctx, item, load))
	}
	both := []string{<-refreshed, <-refreshed}
	slices.Sort(both)
	fmt.Println("refreshed:", both)
	// Output:
	// 7 <nil>
	// 7 <nil>
	// refreshed: [coffee tea]
}

// The fleet asks a source that is down once in FailureTTL, and not at each call. Other calls get a RemoteError.
func ExampleOptions_failureTTL() {
	prices, stop := embeddedCache("prices", time.Minute, &singlefill.Options[int]{FailureTTL: time.Minute})
	defer stop()

	load := func(ctx context.Context, item string) (int, error) {
		fmt.Println("asking for the price of", item)
		return 0, errors.New("price service is down")
	}
	for range 3 {
		_, err := prices.GetOrLoad(context.Background(), "tea", load)
		fmt.Println(err)
	}
	// Output:
	// asking for the price of tea
	// price service is down
	// price service is down
	// price service is down
}

// Errors that have a name are found by errors.Is in every process. Without Errors, a RemoteError has their text only.
func ExampleOptions_errors() {
	rdb, stop := embeddedRedis()
	defer stop()
	errDown := errors.New("price service is down")
	opts := &singlefill.Options[int]{
		Errors:     map[string]error{"down": errDown},
		FailureTTL: time.Minute, // so that the second process gets the failure of the first one
	}
	here := newCache(rdb, "prices", time.Minute, opts) // each process has one
	defer here.Close()
	there := newCache(rdb, "prices", time.Minute, opts)
	defer there.Close()

	load := func(ctx context.Context, item string) (int, error) { return 0, fmt.Errorf("tea: %w", errDown) }
	_, err := here.GetOrLoad(context.Background(), "tea", load)
	_, remote := there.GetOrLoad(context.Background(), "tea", load)
	fmt.Println(errors.Is(err, errDown), errors.Is(remote, errDown))
	// Output: true true
}

// A stale price is served at once while the new one is loaded in the background.
func ExampleOptions_staleWhileRevalidate() {
	refreshed := make(chan string, 1)
	prices, stop := embeddedCache("prices", time.Minute, &singlefill.Options[int]{
		StaleWhileRevalidate: time.Hour,
		Trace: &singlefill.Trace{LoadDone: func(ctx context.Context, info singlefill.LoadInfo) {
			if info.Refresh {
				refreshed <- info.Key
			}
		}},
	})
	defer stop()

	ctx := context.Background()
	load := func(ctx context.Context, item string) (int, error) { return 8, nil }
	// The price is 7, and stale, as if the minute were over.
	if err := errors.Join(prices.Set(ctx, "tea", 7), prices.Expire(ctx, "tea")); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(prices.GetOrLoad(ctx, "tea", load))
	fmt.Println(<-refreshed, "is refreshed")
	fmt.Println(prices.GetOrLoad(ctx, "tea", load))
	// Output:
	// 7 <nil>
	// tea is refreshed
	// 8 <nil>
}

// What the caches of a program have in common is written once.
func ExampleOptionsFor() {
	rdb, stop := embeddedRedis()
	defer stop()

	type User struct{ Name string }
	shared := &singlefill.Options[any]{RedisTimeout: 200 * time.Millisecond, StaleIfError: time.Hour}
	users := newCache(rdb, "users", time.Minute, singlefill.OptionsFor[User](shared))
	defer users.Close()

	forPages := singlefill.OptionsFor[[]byte](shared)
	forPages.Codec = singlefill.Raw
	pages := newCache(rdb, "pages", time.Hour, forPages)
	defer pages.Close()
	fmt.Println(errors.Join(users.Check(context.Background()), pages.Check(context.Background())))
	// Output: <nil>
}

// A client of a JSON API asks it with If-None-Match. A document that has not changed is not sent again.
func ExamplePrevious() {
	var sent atomic.Int64 // bytes of documents
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		const tag = `"v1"`
		if w.Header().Set("ETag", tag); r.Header.Get("If-None-Match") == tag {
			w.WriteHeader(http.StatusNotModified)
			return
		}
		n, _ := fmt.Fprintf(w, `{"name": %q}`, strings.Repeat("tea ", 250))
		sent.Add(int64(n))
	}))
	defer api.Close()

	type Document struct {
		ETag string
		Body []byte
	}
	documents, stop := embeddedCache("documents", time.Minute, &singlefill.Options[Document]{StaleIfError: time.Hour})
	defer stop()

	get := func(ctx context.Context, path string) (d Document, err error) {
		old, _, has := singlefill.Previous[Document](ctx, path)
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, api.URL+path, nil)
		if err != nil {
			return d, err
		}
		if has {
			req.Header.Set("If-None-Match", old.ETag)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return d, err
		}
		defer resp.Body.Close()
		if resp.StatusCode == http.StatusNotModified {
			return old, nil // for one more life
		}
		d.ETag = resp.Header.Get("ETag")
		d.Body, err = io.ReadAll(resp.Body)
		return d, err
	}
	ctx := context.Background()
	for range 10 {
		_, err := documents.GetOrLoad(ctx, "/tea", get)
		if err = errors.Join(err, documents.Expire(ctx, "/tea")); err != nil { // as if the minute were over
			fmt.Println(err)
			return
		}
	}
	fmt.Printf("%d loads, %d bytes sent, %d saved\n", documents.Stats().Loads, sent.Load(), documents.Stats().Loads*sent.Load()-sent.Load())
	// Output: 10 loads, 1012 bytes sent, 9108 saved
}

// A token that knows when it expires is cached until shortly before.
func ExampleOptions_ttlFunc() {
	type Token struct {
		Text    string
		Expires time.Time
	}
	tokens, stop := embeddedCache("tokens", time.Hour, &singlefill.Options[Token]{
		TTLFunc: func(client string, t Token) time.Duration { return time.Until(t.Expires.Add(-time.Minute)) },
	})
	defer stop()

	fetch := func(life time.Duration) singlefill.Loader[Token] {
		return func(ctx context.Context, client string) (Token, error) {
			fmt.Println("fetching a token for", client)
			return Token{Text: "secret", Expires: time.Now().Add(life)}, nil
		}
	}
	for range 2 {
		_, err := tokens.GetOrLoad(context.Background(), "billing", fetch(time.Hour))
		_, err2 := tokens.GetOrLoad(context.Background(), "search", fetch(30*time.Second))
		if err := errors.Join(err, err2); err != nil {
			fmt.Println(err)
		}
	}
	// Output:
	// fetching a token for billing
	// fetching a token for search
	// fetching a token for search
}

// sealed is a Codec that encrypts what another one encodes, by AES-GCM. Its bytes are the number of a secret, a nonce
// and the encrypted value. They can be decrypted only under the namespace and key that they were written for.
type sealed struct {
	values  singlefill.Codec     // may be compress.Zstd: encrypted bytes cannot be compressed
	secrets map[byte]cipher.AEAD // by number
	newest  byte                 // the number of the secret that encrypts; the others only decrypt
	place   []byte               // namespace and key; nil before ForKey
}

// newSealed takes secrets of 32 random bytes.
func newSealed(values singlefill.Codec, newest byte, secrets map[byte][]byte) (s sealed, err error) {
	s = sealed{values: values, newest: newest, secrets: make(map[byte]cipher.AEAD)}
	for number, secret := range secrets {
		block, err := aes.NewCipher(secret)
		if err != nil {
			return s, err
		}
		if s.secrets[number], err = cipher.NewGCMWithRandomNonce(block); err != nil {
			return s, err
		}
	}
	if s.secrets[newest] == nil {
		return s, fmt.Errorf("there is no secret %d", newest)
	}
	return s, nil
}

func (s sealed) Unwrap() singlefill.Codec { return s.values }

func (s sealed) Formats() []string { return []string{"aes-gcm+msgpack"} } // another name for other values

func (s sealed) ForKey(namespace, key string) singlefill.Codec {
	s.place = []byte(namespace + "\x00" + key) // no namespace contains a zero byte
	return s
}

func (s sealed) Marshal(v any) ([]byte, error) {
	if s.place == nil { // a wrapper has lost ForKey
		return nil, errors.New("the value is not bound to a key")
	}
	data, err := s.values.Marshal(v)
	if err != nil {
		return nil, err
	}
	return s.secrets[s.newest].Seal([]byte{s.newest}, nil, data, s.place), nil
}

func (s sealed) Unmarshal(data []byte, v any) error {
	if len(data) == 0 || s.secrets[data[0]] == nil {
		return errors.New("the secret is not known")
	}
	opened, err := s.secrets[data[0]].Open(nil, nil, data[1:], s.place)
	if err != nil {
		return err
	}
	return s.values.Unmarshal(opened, v)
}

// Values are encrypted and bound to their keys: a client that reads Redis learns none, and a client that copies an
// entry to another key causes a miss. Secrets are rotated: the second one encrypts, and the first one still decrypts.
func ExampleCodec_forKey() {
	rdb, stop := embeddedRedis()
	defer stop()
	secrets := map[byte][]byte{1: bytes.Repeat([]byte("1"), 32)} // random ones, from where the service has its secrets
	open := func(newest byte) *singlefill.Cache[string] {
		codec, err := newSealed(singlefill.MsgPack, newest, secrets)
		if err != nil {
			panic(err)
		}
		return newCache(rdb, "salaries", time.Hour, &singlefill.Options[string]{Codec: codec})
	}
	ctx := context.Background()
	before := open(1)
	defer before.Close()
	err := before.Set(ctx, "ada", "1000 guineas")

	secrets[2] = bytes.Repeat([]byte("2"), 32)
	salaries := open(2)
	defer salaries.Close()
	fmt.Println(err, rdb.Copy(ctx, "salaries:{ada}", "salaries:{bob}", 0, true).Err())
	for _, name := range []string{"ada", "bob"} {
		salary, err := salaries.Get(ctx, name)
		fmt.Printf("%q %v\n", salary, err)
	}
	fmt.Println(salaries.Stats().BadValues, "bad value")
	// Output:
	// <nil> <nil>
	// "1000 guineas" <nil>
	// "" singlefill: miss
	// 1 bad value
}
