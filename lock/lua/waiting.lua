-- What the scripts of locks know of the waiters that a release wakes.
--
-- A waiter listens on a channel of its process, which has the name of the lock and the first twelve
-- characters of its token. The message is the token of the waiter that is woken. One more waiter gets
-- an empty message: it asks later, in case the other one is dead.

local function tell(lock, token, message)
  return wake(lock .. ':' .. string.sub(token, 1, 12), message)
end

-- Wakes the first waiter of a queue.
local function wakeHead(lock, queue)
  pcall(function() -- the release counts even if no waiter can be woken
    local waiters = redis.call('ZRANGE', queue, 0, 1)
    if waiters[1] then tell(lock, waiters[1], waiters[1]) end
    if waiters[2] then tell(lock, waiters[2], '') end
  end)
end

-- Takes a waiter out of a queue. Without waiters in it, no process has to count as alive.
local function leaveQueue(call, queue, alive, token)
  call('ZREM', queue, token)
  if call('EXISTS', queue) == 0 then call('ZREMRANGEBYRANK', alive, 0, -1) end -- which refuses a foreign key
end

-- waiting is a sorted set of the attempts at a mutex or semaphore that listen, by the server's time in
-- µs at which their process began to wait. A release removes the attempt that it wakes. If another
-- attempt is quicker, it comes back with its next command, and with the same time.

-- Adds an attempt to the waiting. Returns 1 if it was not there; 2 if so many wait that the latest are dropped, or soon
-- may be: then its absence tells nothing.
local function awaitWakeUp(waiting, token, since, life)
  local function outlive()
    if redis.call('PTTL', waiting) < tonumber(life) then redis.call('PEXPIRE', waiting, life) end
  end
  local added = 0
  pcall(function() -- without it the attempt only asks
    local many = redis.call('ZCARD', waiting) -- refuses a foreign key, which must not get a TTL
    -- First this: without the permission for it, no key may be left without a TTL.
    outlive()
    added = redis.call('ZADD', waiting, since, token)
    outlive()
    redis.call('ZREMRANGEBYRANK', waiting, 500, -1)
    if many >= 450 then added = 2 end
  end)
  return added
end

-- Takes an attempt that gets the lock out of the waiting. Returns whether a release has done so before.
local function leaves(waiting, token, listens)
  return redis.pcall('ZREM', waiting, token) == 0 and listens
end

-- Wakes the waiter that can have a place that is free now: the one with the reservation, which lives
-- for another life ms at most, or the waiter that has waited longest. With others, another waiter
-- can have the place if the waiter with the reservation has been woken before. A waiter that does
-- not listen any more is dead.
local function wakeNext(lock, reservation, waiting, life, others)
  pcall(function() -- the release counts even if no waiter can be woken
    if redis.call('EXISTS', reservation, waiting) == 0 then return end
    local reserved = redis.call('GET', reservation)
    local token
    if reserved then
      if redis.call('PTTL', reservation) > tonumber(life) then redis.call('PEXPIRE', reservation, life) end
      token = string.sub(reserved, 21)
      if redis.call('ZREM', waiting, token) == 0 and others then token = nil end
      if token then tell(lock, token, token) end
    end
    while not token do
      token = redis.call('ZPOPMIN', waiting)[1]
      if not token then return end
      if tell(lock, token, token) == 0 then token = nil end
    end
    local last = redis.call('ZRANGE', waiting, -1, -1)[1]
    while last and tell(lock, last, '') == 0 do
      redis.call('ZREM', waiting, last)
      last = redis.call('ZRANGE', waiting, -1, -1)[1]
    end
  end)
end
