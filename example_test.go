package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
)

// embeddedRedis lets the examples run anywhere. A service makes a client of its Redis instead.
func embeddedRedis() (rdb *redis.Client, stop func()) {
	mini, err := miniredis.Run()
	if err != nil {
		panic(err)
	}
	mini.ClockTTL(true) // or nothing would ever expire
	rdb = redis.NewClient(&redis.Options{Addr: mini.Addr()})
	return rdb, func() { rdb.Close(); mini.Close() }
}

// However many ask for a key at once, in whatever process, it is loaded once.
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

// The second call is a hit. An error of the Loader comes back as it is and is not remembered.
func ExampleCache_GetOrLoad() {
	rdb, stop := embeddedRedis()
	defer stop()
	prices, err := singlefill.New[int](rdb, "prices", time.Minute, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer prices.Close()

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
	_, err = prices.GetOrLoad(ctx, "tea", load)
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

// Whoever changes the source deletes the key afterwards. A load that had begun before is not stored.
func ExampleCache_Delete() {
	rdb, stop := embeddedRedis()
	defer stop()
	names, err := singlefill.New[string](rdb, "names", time.Hour, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer names.Close()

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

// A source that is down takes none of its readers down while there is an old value.
func ExampleOptions_staleIfError() {
	rdb, stop := embeddedRedis()
	defer stop()
	prices, err := singlefill.New(rdb, "prices", time.Minute, &singlefill.Options[int]{StaleIfError: time.Hour})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer prices.Close()

	down := false
	load := func(ctx context.Context, item string) (int, error) {
		if down {
			return 0, errors.New("price service is down")
		}
		return 42, nil
	}
	ctx := context.Background()
	if _, err := prices.GetOrLoad(ctx, "tea", load); err != nil {
		fmt.Println(err)
	}
	if err := prices.Expire(ctx, "tea"); err != nil { // as if the minute were over
		fmt.Println(err)
	}
	down = true
	price, info, err := prices.GetOrLoadInfo(ctx, "tea", load)
	fmt.Println(price, err, "stale:", info.Stale, "because:", info.Err)

	if err := prices.Delete(ctx, "tea"); err != nil { // now there is nothing left to serve
		fmt.Println(err)
	}
	_, err = prices.GetOrLoad(ctx, "tea", load)
	fmt.Println(err)
	// Output:
	// 42 <nil> stale: true because: price service is down
	// price service is down
}

// A Loader says ErrNotFound when there is no such thing, and that is remembered too.
func Example_notFound() {
	rdb, stop := embeddedRedis()
	defer stop()
	names, err := singlefill.New[string](rdb, "names", time.Hour, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer names.Close()

	table := map[string]string{"42": "Ada"}
	queries := 0
	load := func(ctx context.Context, id string) (string, error) {
		queries++
		name, ok := table[id]
		if !ok {
			return "", fmt.Errorf("user %s: %w", id, singlefill.ErrNotFound)
		}
		return name, nil
	}

	for range 3 {
		_, err := names.GetOrLoad(context.Background(), "43", load)
		fmt.Println(errors.Is(err, singlefill.ErrNotFound))
	}
	fmt.Println("queries:", queries)
	// Output:
	// true
	// true
	// true
	// queries: 1
}

// A token that knows when it expires is kept until shortly before.
func ExampleOptions_ttlFunc() {
	rdb, stop := embeddedRedis()
	defer stop()

	type Token struct {
		Text    string
		Expires time.Time
	}
	tokens, err := singlefill.New(rdb, "tokens", time.Hour, &singlefill.Options[Token]{
		TTLFunc: func(client string, t Token) time.Duration { return time.Until(t.Expires) - time.Minute },
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer tokens.Close()

	fetch := func(life time.Duration) singlefill.Loader[Token] {
		return func(ctx context.Context, client string) (Token, error) {
			fmt.Println("fetching a token for", client)
			return Token{Text: "secret", Expires: time.Now().Add(life)}, nil
		}
	}
	for range 2 {
		if _, err := tokens.GetOrLoad(context.Background(), "billing", fetch(time.Hour)); err != nil {
			fmt.Println(err)
		}
		if _, err := tokens.GetOrLoad(context.Background(), "search", fetch(30*time.Second)); err != nil {
			fmt.Println(err)
		}
	}
	// Output:
	// fetching a token for billing
	// fetching a token for search
	// fetching a token for search
}

// One client serves any number of caches. Their namespaces keep them apart.
func Example_sharedClient() {
	rdb, stop := embeddedRedis()
	defer stop()

	names, err := singlefill.New[string](rdb, "names", time.Hour, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer names.Close()
	ages, err := singlefill.New[int](rdb, "ages", time.Minute, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer ages.Close()

	ctx := context.Background()
	fmt.Println(names.GetOrLoad(ctx, "42", func(ctx context.Context, id string) (string, error) { return "Ada", nil }))
	fmt.Println(ages.GetOrLoad(ctx, "42", func(ctx context.Context, id string) (int, error) { return 36, nil }))
	// Output:
	// Ada <nil>
	// 36 <nil>
}

// A handler gives each request a deadline of its own. It ends that request only: the load goes on and fills
// the cache.
func Example_httpHandler() {
	rdb, stop := embeddedRedis()
	defer stop()
	pages, err := singlefill.New[string](rdb, "pages", time.Minute, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pages.Close()

	render := func(ctx context.Context, name string) (string, error) {
		if name != "home" {
			return "", singlefill.ErrNotFound
		}
		return "Welcome", nil
	}
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), 2*time.Second)
		defer cancel()
		page, err := pages.GetOrLoad(ctx, strings.TrimPrefix(r.URL.Path, "/"), render)
		switch {
		case errors.Is(err, singlefill.ErrNotFound):
			http.NotFound(w, r)
		case errors.Is(err, context.DeadlineExceeded):
			http.Error(w, "try again", http.StatusGatewayTimeout)
		case err != nil:
			http.Error(w, "something went wrong", http.StatusInternalServerError)
		default:
			fmt.Fprint(w, page)
		}
	})

	for _, path := range []string{"/home", "/away"} {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		fmt.Println(w.Code, strings.TrimSpace(w.Body.String()))
	}
	// Output:
	// 200 Welcome
	// 404 404 page not found
}
